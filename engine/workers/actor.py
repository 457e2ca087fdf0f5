"""The actor: owns the policy's weights, gives its log-probs and updates it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.algorithms import losses
from engine.algorithms.aggregation import Denominators, aggregate
from engine.algorithms.kl import kl_estimate
from engine.algorithms.metrics import Sum, finish, merge, over_mask
from engine.algorithms.skip import rows_with_gradient
from engine.batch import TOKENS, Batch
from engine.config import ActorConfig, LoRAConfig, PreferenceConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import CheckpointError
from engine.models import policy_model, save_model
from engine.models.forward import TokenOutputs, token_outputs
from engine.plugins import import_plugins
from engine.workers.base import Dispatch, WorkerContext, dispatch
from engine.workers.micro import micro_batches
from engine.workers.optim import Optimizer
from engine.workers.options import policy_loss_options
from engine.workers.pairs import accumulate_pairs
from engine.workers.state import StatefulWorker, load_trained_state, trained_state
from engine.workers.weights import pack_policy

Metrics = dict[str, Sum]


class ActorWorker(StatefulWorker):
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
        lora: LoRAConfig | None = None,
        preference: PreferenceConfig | None = None,
        sum_pi_squared: bool = False,
        plugins: tuple[str, ...] = (),
    ) -> None:
        super().__init__(context)
        import_plugins(plugins)
        self.config, self.temperature = config, temperature
        self.preference, self.sum_pi_squared = preference or PreferenceConfig(), sum_pi_squared
        # Dropout stays off: the update must see the probabilities that the rollout sampled from.
        self.model = policy_model(model_path, dtype, lora, seed)
        self.lora = lora or LoRAConfig()
        self.tokenizer_path = model_path
        self.optimizer = Optimizer(self.model, config.optim, total_steps)
        self.generator = torch.Generator().manual_seed(seed)
        self.loss_options = policy_loss_options(config)
        self.loss_agg_mode = losses.aggregation_mode(
            config.policy_loss.loss_mode, config.loss_agg_mode
        )
        context.shared["policy"] = self.model
        context.shared["policy_version"] = 0

    @dispatch(Dispatch.DATA_PARALLEL, reads=TOKENS, gives=("old_log_probs", "sum_pi_squared"))
    def log_probs(self, batch: Batch) -> Batch:
        """The policy's log-probs before the update: `old_log_probs [B, R]`.

        Adds `sum_pi_squared [B, R]` where the worker was built for an estimator that reads it.
        """
        out = {"old_log_probs": torch.zeros(batch["responses"].shape)}
        if self.sum_pi_squared:
            out["sum_pi_squared"] = torch.zeros(batch["responses"].shape)
        with torch.no_grad():
            for rows, micro in micro_batches(batch, self.config.max_tokens_per_micro_batch):
                width = micro["responses"].shape[1]
                got = token_outputs(
                    self.model, micro, self.temperature, sum_pi_squared=self.sum_pi_squared
                )
                out["old_log_probs"][rows, :width] = got.log_probs.cpu()
                if got.sum_pi_squared is not None:
                    out["sum_pi_squared"][rows, :width] = got.sum_pi_squared.cpu()
        return Batch(out)

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch and return metrics, averaged over its tokens.

        Reads `advantages`, `old_log_probs` (or `rollout_log_probs` in its place), what the policy
        loss prepared over the global batch, `rollout_is_weights` if there are any and, for a KL
        term, `ref_log_probs`, all `[B, R]`.
        """
        if "old_log_probs" not in batch:
            batch = batch | {"old_log_probs": batch["rollout_log_probs"]}
        return self._optimize(self._minibatches(batch), self._accumulate)

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def update_pairs(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch of pairs: rows 2i are chosen, 2i+1 rejected.

        Reads `ref_log_probs [B, R]`, unless the preference loss knows no reference.
        """
        pairs = torch.arange(len(batch)).view(-1, 2)
        size = (self.config.ppo_mini_batch_size or len(batch)) // 2

        def minis() -> Iterator[Batch]:
            order = torch.randperm(len(pairs), generator=self.generator)
            for part in order.split(max(1, size)):
                yield batch.rows(pairs[part].flatten())

        def accumulate(mini: Batch) -> Metrics:
            budget = self.config.max_tokens_per_micro_batch
            return accumulate_pairs(self.model, mini, self.preference, self.temperature, budget)

        return self._optimize(minis, accumulate)

    def _minibatches(self, batch: Batch) -> Callable[[], Iterator[Batch]]:
        size = self.config.ppo_mini_batch_size or len(batch)
        return lambda: batch.minibatches(size, self.generator if size < len(batch) else None)

    def _optimize(
        self, minis: Callable[[], Iterator[Batch]], accumulate: Callable[[Batch], Metrics]
    ) -> dict[str, float]:
        """Step on every mini-batch of every epoch; the policy is one version newer afterwards."""
        norms, parts = [], []
        for _ in range(self.config.ppo_epochs):
            for mini in minis():
                parts.append(accumulate(mini))
                norms.append(self.optimizer.step())
        self.context.shared["policy_version"] += 1
        metrics = {f"actor/{k}": v for k, v in finish(merge(parts)).items()}
        return metrics | {
            "actor/grad_norm": sum(norms) / len(norms),
            "actor/lr": self.optimizer.lr,
        }

    def _accumulate(self, mini: Batch) -> Metrics:
        """Add the gradients of one mini-batch, micro-batch by micro-batch.

        Rows that can't change the gradient get no pass; the denominators count them all the same.
        """
        config, mask = self.config, mini["response_mask"]
        denominators = Denominators.from_mask(mask)
        active = rows_with_gradient(
            config.policy_loss.loss_mode,
            mini["advantages"],
            mask,
            entropy_coeff=config.entropy_coeff,
            kl_loss_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        )
        parts = [{"rows_skipped": over_mask((~active).double(), mask.any(1))}]
        if not bool(active.any()):
            self.optimizer.zero_gradients()  # Adam's momentum still moves the weights
            return merge(parts)
        rows = mini if bool(active.all()) else mini.rows(active)
        for _, micro in micro_batches(rows, config.max_tokens_per_micro_batch):
            loss, metrics = self._loss(micro, denominators)
            loss.backward()
            parts.append(metrics)
        return merge(parts)

    def _loss(self, micro: Batch, denominators: Denominators) -> tuple[Tensor, Metrics]:
        """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL of one micro-batch."""
        config, mask = self.config, micro["response_mask"]
        full = config.use_kl_loss and config.kl_loss_type == "full"
        got = token_outputs(
            self.model,
            micro,
            self.temperature,
            entropy=True,
            entropy_gradient=config.entropy_coeff > 0,
            reference=self.context.shared["reference"] if full else None,
        )
        assert got.entropy is not None
        policy_loss = losses.get_policy_loss(config.policy_loss.loss_mode)
        out = policy_loss(
            got.log_probs,
            micro["old_log_probs"],
            micro["advantages"],
            mask,
            rollout_is_weights=micro.get("rollout_is_weights"),
            **self.loss_options,
            **{name: micro[name] for name in policy_loss.prepared},
        )
        loss = self._aggregate(out.loss, mask, denominators)
        metrics = dict(out.metrics) | {"entropy": over_mask(got.entropy, mask)}
        if config.entropy_coeff:
            entropy = self._aggregate(got.entropy, mask, denominators)
            loss = loss - config.entropy_coeff * entropy
        kl = self._kl(got, micro)
        if kl is not None:
            metrics["kl"] = over_mask(kl, mask)
            if config.use_kl_loss:
                loss = loss + config.kl_loss_coef * self._aggregate(kl, mask, denominators)
        return loss, metrics

    def _kl(self, got: TokenOutputs, micro: Batch) -> Tensor | None:
        """KL to the reference `[B, R]`, where the batch or the process has one."""
        if got.full_kl is not None:
            return got.full_kl
        if "ref_log_probs" not in micro:
            return None
        kind = self.config.kl_loss_type if self.config.use_kl_loss else "low_var_kl"
        mask = micro["response_mask"]
        return kl_estimate(got.log_probs, micro["ref_log_probs"], kind, mask=mask)

    def _aggregate(self, tokens: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
        return aggregate(
            tokens,
            mask,
            self.loss_agg_mode,
            denominators,
            scale_factor=self.config.loss_scale_factor,
        )

    @dispatch(Dispatch.RANK_ZERO)
    def weights(self) -> Batch:
        """What is trained of the weights, and its version, for rollout in other processes."""
        return pack_policy(self.context.shared)

    @dispatch(Dispatch.RANK_ZERO)
    def save(self, folder: str) -> str:
        """Write the policy and its tokenizer as a Hugging Face folder; adapters go with it."""
        return str(save_model(self.model, load_tokenizer(self.tokenizer_path), Path(folder)))

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, the generator that shuffles mini-batches, and the version."""
        own = {"policy_version": self.context.shared["policy_version"]}
        if self.lora.rank:
            own |= {"lora_alpha": self.lora.alpha}
        return trained_state(self.model, self.optimizer, self.generator) | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` in place: engines that share the weights' storage see it too.

        Raises CheckpointError for another model's, or for adapters of another alpha.
        """
        alpha = state.get("lora_alpha", self.lora.alpha)
        if self.lora.rank and alpha != self.lora.alpha:  # no tensor's shape tells
            raise CheckpointError(
                f"the checkpoint's adapters have model.lora.alpha={alpha}, this run has "
                f"{self.lora.alpha}; resume with the alpha that was saved"
            )
        load_trained_state(state, self.model, self.optimizer, self.generator)
        self.context.shared["policy_version"] = state["policy_version"]
