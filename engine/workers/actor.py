"""The actor: owns the policy's weights, gives its log-probs and updates it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.algorithms import losses
from engine.algorithms.aggregation import Denominators, aggregate
from engine.algorithms.kl import kl_estimate
from engine.algorithms.metrics import Sum, finish, merge, over_mask
from engine.batch import Batch
from engine.config import ActorConfig
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model, save_model
from engine.models.forward import response_log_probs
from engine.workers.base import Dispatch, Worker, WorkerContext, dispatch
from engine.workers.micro import micro_batches
from engine.workers.optim import Optimizer
from engine.workers.options import policy_loss_options


class ActorWorker(Worker):
    """Trains the policy. Shares `policy` (the model) and `policy_version` with its process."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        config: ActorConfig,
        temperature: float,
        total_steps: int,
        seed: int,
        dtype: str = "float32",
    ) -> None:
        super().__init__(context)
        self.config, self.temperature = config, temperature
        self.model = load_model(model_path, dtype)
        # Dropout stays off: the update must see the probabilities that the rollout sampled from.
        self.model.eval()
        self.tokenizer_path = model_path
        self.optimizer = Optimizer(self.model, config.optim, total_steps)
        self.generator = torch.Generator().manual_seed(seed)
        self.loss_options = policy_loss_options(config)
        self.loss_agg_mode = losses.aggregation_mode(
            config.policy_loss.loss_mode, config.loss_agg_mode
        )
        context.shared["policy"] = self.model
        context.shared["policy_version"] = 0

    @dispatch(Dispatch.DATA_PARALLEL)
    def log_probs(self, batch: Batch) -> Batch:
        """The policy's log-probs before the update: `old_log_probs [B, R]`."""
        out = torch.zeros(batch["responses"].shape)
        with torch.no_grad():
            for rows, micro in micro_batches(batch, self.config.max_tokens_per_micro_batch):
                width = micro["responses"].shape[1]
                out[rows, :width] = response_log_probs(self.model, micro, self.temperature)[0]
        return Batch({"old_log_probs": out})

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch and return metrics, averaged over its tokens.

        Reads `advantages`, `old_log_probs` (or `rollout_log_probs` in its place) and, for a KL
        term, `ref_log_probs`, all `[B, R]`.
        """
        if "old_log_probs" not in batch:
            batch = batch | {"old_log_probs": batch["rollout_log_probs"]}
        batch = batch | losses.prepare(
            self.config.policy_loss.loss_mode,
            batch["old_log_probs"],
            batch["advantages"],
            batch["response_mask"],
            generator=self.generator,
            **self.loss_options,
        )
        norms, parts = [], []
        for _ in range(self.config.ppo_epochs):
            size = self.config.ppo_mini_batch_size or len(batch)
            for mini in batch.minibatches(size, self.generator if size < len(batch) else None):
                parts.append(self._accumulate(mini))
                norms.append(self.optimizer.step())
        self.context.shared["policy_version"] += 1
        metrics = {f"actor/{k}": v for k, v in finish(merge(parts)).items()}
        return metrics | {
            "actor/grad_norm": sum(norms) / len(norms),
            "actor/lr": self.optimizer.lr,
        }

    def _accumulate(self, mini: Batch) -> dict[str, Sum]:
        """Add the gradients of one mini-batch, micro-batch by micro-batch."""
        denominators = Denominators.from_mask(mini["response_mask"])
        parts = []
        for _, micro in micro_batches(mini, self.config.max_tokens_per_micro_batch):
            loss, metrics = self._loss(micro, denominators)
            loss.backward()
            parts.append(metrics)
        return merge(parts)

    def _loss(self, micro: Batch, denominators: Denominators) -> tuple[Tensor, dict[str, Sum]]:
        """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL of one micro-batch."""
        config, mask = self.config, micro["response_mask"]
        log_probs, entropy = response_log_probs(
            self.model, micro, self.temperature, with_entropy=True
        )
        assert entropy is not None
        policy_loss = losses.get_policy_loss(config.policy_loss.loss_mode)
        out = policy_loss(
            log_probs,
            micro["old_log_probs"],
            micro["advantages"],
            mask,
            **self.loss_options,
            **{name: micro[name] for name in policy_loss.prepared},
        )
        mode = self.loss_agg_mode
        loss = aggregate(out.loss, mask, mode, denominators)
        metrics = dict(out.metrics) | {"entropy": over_mask(entropy, mask)}
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * aggregate(entropy, mask, mode, denominators)
        if "ref_log_probs" in micro:
            kl = kl_estimate(log_probs, micro["ref_log_probs"], config.kl_loss_type, mask=mask)
            metrics["kl"] = over_mask(kl, mask)
            if config.use_kl_loss:
                loss = loss + config.kl_loss_coef * aggregate(kl, mask, mode, denominators)
        return loss, metrics

    @dispatch(Dispatch.RANK_ZERO)
    def save(self, folder: str) -> str:
        """Write the policy and its tokenizer as a Hugging Face folder."""
        return str(save_model(self.model, load_tokenizer(self.tokenizer_path), Path(folder)))
