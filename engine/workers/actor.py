"""The actor role: the policy's log-probs and updates, and its weights for rollout and files.

Also the gradient of a student's divergence from its teachers. The micro-batch loop is in
`engine.runtime.sharded_model`, losses are in `engine.algorithms`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.algorithms import policy_losses
from engine.algorithms.aggregation import (
    Denominators,
    MeanAccumulator,
    accumulate_mean,
    aggregate,
    compute_means,
)
from engine.algorithms.correction import GAP_PREFIXES, gap_metrics
from engine.algorithms.critic_loss import rows_with_gradient
from engine.algorithms.divergences import kl_estimate
from engine.algorithms.preference_losses import get_pair_loss
from engine.batch import TOKENS, Batch
from engine.checkpoint.format import RankState
from engine.checkpoint.state_dict import StateDict
from engine.config import ActorConfig, DistillationConfig, LoRAConfig, PreferenceConfig
from engine.errors import CheckpointError
from engine.models.forward import (
    DivergenceReader,
    LogProbReader,
    Outputs,
    ReferenceLogits,
    TokenOutputs,
)
from engine.parallel.layout import Layout
from engine.runtime.optimizer import update_metrics
from engine.runtime.pair_gradients import accumulate_pairs
from engine.runtime.policy_runtime import PolicyRuntime, StartModel, save_ranks
from engine.runtime.sharded_model import ShardedModel, init_mesh, minibatch_indices, untrimmed
from engine.runtime.train_state import ShardedTrainState, same_start, weights_fingerprint
from engine.weight_transfer import WeightSender
from engine.workers.algorithm_options import policy_loss_options, preference_options
from engine.workers.role import Dispatch, WorkerContext, dispatch
from engine.workers.stateful import TrainingWorker

# Gradients of a student's divergence from its teachers, token by token.


def accumulate_divergence(
    sharded: ShardedModel,
    batch: Batch,
    reader: DivergenceReader,
    aggregate: Callable[[Tensor, Tensor, Denominators], Tensor],
    max_tokens: int,
) -> list[dict[str, MeanAccumulator]]:
    """Add the gradients of the divergence over all ranks' tokens, as `aggregate` makes one number
    of them `[B, R]`, their mask and its counts. Returns metrics: `divergence`, `entropy`."""
    denominators = sharded.global_counts(batch["response_mask"])

    def loss(got: Outputs, micro: Batch) -> tuple[Tensor, dict[str, MeanAccumulator]]:
        mask = micro["response_mask"]
        names = ("divergence", "entropy")
        metrics = {name: accumulate_mean(got[name].detach(), mask) for name in names}
        return aggregate(got["divergence"], mask, denominators), metrics

    micros = [micro for _, micro in sharded.micro_batches(batch, max_tokens)]
    return sharded.accumulate(batch, micros, reader, loss)


# The actor role: the policy's log-probs and updates, and its weights for rollout and files.

Metrics = dict[str, MeanAccumulator]


class ActorWorker(TrainingWorker):
    """Trains the policy, which it shares with its process."""

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
        distillation: DistillationConfig | None = None,
        sum_pi_squared: bool = False,
        sampler_dtype: str = "",
        delta_sync: bool = False,
    ) -> None:
        super().__init__(context)
        self.config, self.temperature = config, temperature
        self.preference, self.sum_pi_squared = preference or PreferenceConfig(), sum_pi_squared
        self.distillation = distillation or DistillationConfig()
        layout = Layout.of(config.parallel)
        ranks = init_mesh(layout, context.rank, context.world_size, context.address)
        self._start_model = StartModel(model_path, dtype, lora, seed)
        model = self._start_model.open()  # in eval mode: updates see what rollout sampled from
        self.start = weights_fingerprint(model)
        self.policy = PolicyRuntime(model, ranks, config.parallel)
        self.sharded = self.policy.sharded
        context.process.policy = self.policy
        self.lora = lora or LoRAConfig()
        self.tokenizer_path = model_path
        cast = getattr(torch, sampler_dtype) if sampler_dtype and not self.lora.rank else None
        self.sender = WeightSender(cast, deltas=delta_sync)
        self.train_state = ShardedTrainState(self.sharded, config.optim, total_steps, seed)
        self.loss_options = policy_loss_options(config)
        self.loss_agg_mode = policy_losses.aggregation_mode(
            config.policy_loss.loss_mode, config.loss_agg_mode
        )

    @dispatch(
        Dispatch.DATA_PARALLEL,
        reads=(*TOKENS, "routed_experts"),
        writes=("old_log_probs", "sum_pi_squared", "routed_experts"),
    )
    def log_probs(self, batch: Batch) -> Batch:
        """The policy's log-probs before the update: `old_log_probs [B, R]`.

        Adds `sum_pi_squared [B, R]` where the worker was built for an estimator that reads it, and
        `routed_experts [B, P+R, K]` for the update to replay (R2).
        """
        passes = self.sharded.micro_batches(batch, self.config.max_tokens_per_micro_batch)
        mode, chosen = self.config.router_replay.mode, list[Tensor]()
        reader = self._reader(
            sum_pi_squared=self.sum_pi_squared,
            replay=mode == "R3",
            record=chosen.append if mode == "R2" else None,
        )
        out = self.sharded.outputs(batch, passes, reader)
        out = {"old_log_probs": out.pop("log_probs")} | out
        return Batch(out | ({"routed_experts": untrimmed(batch, passes, chosen)} if chosen else {}))

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def update(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch and return metrics, averaged over its tokens.

        Reads `advantages`, `old_log_probs` (or `rollout_log_probs` in its place), what the policy
        loss prepared over the global batch, `rollout_is_weights` if there are any and, for a KL
        term, `ref_log_probs`, all `[B, R]`.
        """
        gap = "old_log_probs" not in batch  # else it is known of the whole batch
        if gap:
            batch = batch | {"old_log_probs": batch["rollout_log_probs"]}

        def accumulate(mini: Batch) -> list[Metrics]:
            nonlocal gap
            parts, gap = self._accumulate(mini, gap=gap), False  # of the weights that sampled
            return parts

        return self._optimize(batch, 1, accumulate)

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, unit=2, pad=True)
    def update_pairs(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch of pairs: rows 2i are chosen, 2i+1 rejected.

        Reads `ref_log_probs [B, R]`, unless the preference loss has no reference. A step may have
        fewer pairs than there are ranks.
        """

        options = preference_options(self.preference)
        pair_loss = partial(get_pair_loss(self.preference.loss), **options)

        def accumulate(mini: Batch) -> list[Metrics]:
            budget = self.config.max_tokens_per_micro_batch
            return accumulate_pairs(self.sharded, mini, pair_loss, self._reader(), budget)

        return self._optimize(batch, 2, accumulate)

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def update_distilled(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch on the divergence from its teachers.

        Reads `teacher_weights [B, T]` and, with `distillation.top_k`, `teacher_ids` and
        `teacher_log_probs`; without it the teachers are in this process.
        """
        config, teachers = self.distillation, self.context.process.teachers
        assert config.loss != "policy_gradient", "that is a policy gradient's update"
        reader = DivergenceReader(
            self.temperature,
            config.loss,
            config.beta,
            teachers=() if config.top_k else [teacher.logits for teacher in teachers],
            skip=self.sharded.ranks.layout.world_size == 1,
        )
        budget = self.config.max_tokens_per_micro_batch
        return self._optimize(
            batch,
            1,
            lambda mini: accumulate_divergence(self.sharded, mini, reader, self._aggregate, budget),
        )

    @dispatch(Dispatch.ONE_TO_ALL)
    def skip_update(self) -> dict[str, float]:
        """Leave the policy as it is for a step, and raise its version all the same."""
        self.policy.version += 1
        return {}

    def _optimize(
        self, batch: Batch, unit: int, accumulate: Callable[[Batch], list[Metrics]]
    ) -> dict[str, float]:
        """Step on every mini-batch of every epoch, and raise the policy's version by one.

        Each `unit` consecutive rows stay together.
        """
        ranks, size = self.sharded.ranks, self.config.ppo_mini_batch_size // unit
        optimizer, generator = self.train_state.optimizer, self.train_state.generator
        runs = torch.arange(len(batch)).view(-1, unit)
        norms, parts = [], []
        for _ in range(self.config.ppo_epochs):
            for index in minibatch_indices(len(runs), size, ranks, generator):
                whole = len(index) == len(runs)
                parts += accumulate(batch if whole else batch.rows(runs[index].flatten()))
                norms.append(optimizer.step())
        self.policy.version += 1
        metrics = compute_means(self.sharded.all_reduce_metrics(parts))
        metrics |= update_metrics(norms, optimizer.loss_scale) | {"lr": optimizer.lr}
        return {k if k.startswith(GAP_PREFIXES) else f"actor/{k}": v for k, v in metrics.items()}

    def _accumulate(self, mini: Batch, *, gap: bool = False) -> list[Metrics]:
        """Add the gradients of one mini-batch, micro-batch by micro-batch.

        Rows that can't change the gradient are skipped; the denominators count them all the same.
        `gap`: measure how far log-probs are from rollout's.
        """
        config, mask = self.config, mini["response_mask"]
        denominators = self.sharded.global_counts(mask)
        active = rows_with_gradient(
            config.policy_loss.loss_mode,
            mini["advantages"],
            mask,
            entropy_coeff=config.entropy_coeff or config.router_aux_loss_coef,
            kl_loss_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        )
        skipped: Metrics = {"rows_skipped": accumulate_mean((~active).double(), mask.any(1))}
        if not self.sharded.any_rank_has(int(active.sum())):
            self.train_state.optimizer.zero_gradients()  # Adam's momentum still moves the weights
            return [skipped]
        rows = None if bool(active.all()) else active
        passes = self.sharded.micro_batches(mini, config.max_tokens_per_micro_batch, rows)
        micros = [micro for _, micro in passes]
        full = config.use_kl_loss and config.kl_loss_type == "full"
        reader = self._reader(
            entropy=True,
            entropy_gradient=config.entropy_coeff > 0,
            reference=self._reference_logits() if full else None,
            router_balance=config.router_aux_loss_coef > 0,
            replay=config.router_replay.mode != "disabled",
        )

        def loss(got: Outputs, micro: Batch) -> tuple[Tensor, Metrics]:
            value, metrics = self._loss(TokenOutputs(**got), micro, denominators)
            if gap:
                mask = micro["response_mask"]
                metrics |= gap_metrics(got["log_probs"], micro["rollout_log_probs"], mask)
            return value, metrics

        return [skipped, *self.sharded.accumulate(mini, micros, reader, loss)]

    def _reference_logits(self) -> ReferenceLogits:
        reference = self.context.process.reference
        assert reference is not None, "the exact KL needs a reference in the same process"
        return reference.logits

    def _reader(self, **asked: Any) -> LogProbReader:
        return LogProbReader(self.temperature, statistics=self.sharded.statistics(), **asked)

    def _loss(
        self, got: TokenOutputs, micro: Batch, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL of one micro-batch; of a
        mixture, + router_aux_loss_coef · the routers' balance."""
        config, mask = self.config, micro["response_mask"]
        assert got.entropy is not None
        policy_loss = policy_losses.get_policy_loss(config.policy_loss.loss_mode)
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
        metrics = {"pg_loss": accumulate_mean(out.loss, mask)} | dict(out.metrics)
        metrics["entropy"] = accumulate_mean(got.entropy, mask)
        if config.entropy_coeff:
            entropy = self._aggregate(got.entropy, mask, denominators)
            loss = loss - config.entropy_coeff * entropy
        kl = self._kl(got, micro)
        if kl is not None:
            metrics["kl"] = accumulate_mean(kl, mask)
            if config.use_kl_loss:
                loss = loss + config.kl_loss_coef * self._aggregate(kl, mask, denominators)
        if (balance := got.router_balance) is not None:
            metrics["router_aux_loss"] = accumulate_mean(balance, mask)
            mean = aggregate(balance, mask, "token-mean", denominators)
            loss = loss + config.router_aux_loss_coef * mean
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

    @dispatch(Dispatch.ONE_TO_ALL)
    def weights(self) -> Batch:
        """What is trained of the weights, and its version, for rollout in other processes."""
        return self.policy.pack_weights(self.sender)

    @dispatch(Dispatch.RANK_ZERO)
    def weights_delta(self) -> Batch:
        """What the last `weights` changed of those before, where the worker syncs by deltas."""
        return self.sender.delta()

    @dispatch(Dispatch.ONE_TO_ALL)
    def save(self, folder: str) -> str:
        """Write the policy, its adapters and its tokenizer as a Hugging Face folder."""
        save_ranks(self.policy, self._start_model, Path(folder))
        return folder

    def state_dict(self) -> StateDict:
        """Weights, moments, the generator that shuffles mini-batches, and the version."""
        own = {"policy_version": self.policy.version, "start": self.start}
        if self.lora.rank:
            own |= {"lora_alpha": self.lora.alpha}
        return super().state_dict() | own

    def load_sharded_state(self, own: RankState, saved: list[RankState]) -> None:
        """Restore what all ranks saved, in place: engines that share the weights see it too.

        Raises CheckpointError for the state of another model, even one of the same shape, and for
        adapters of another alpha.
        """
        alpha = own.get("lora_alpha")
        if alpha is not None and self.lora.rank and alpha != self.lora.alpha:  # not seen in shapes
            raise CheckpointError(
                f"the checkpoint's adapters have model.lora.alpha={alpha}, this run has "
                f"{self.lora.alpha}; resume with the alpha that was saved"
            )
        self.train_state.check(saved)
        if not same_start(own.get("start"), self.start):
            raise CheckpointError(
                f"the checkpoint is of another model: training began with other weights than those "
                f"in {self.tokenizer_path}; resume with the model that it began with"
            )
        super().load_sharded_state(own, saved)
        self.policy.version = own.get("policy_version")
