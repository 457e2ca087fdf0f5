"""The roles that train: one optimizer step after another, and the actor, whose policy RL improves.

`TrainingWorker.accumulate` is the loop over micro-batches of every such role: forward pass, loss,
backward pass. Passes over this rank's shard of a model are in `engine.runtime.sharded_model`,
losses in `engine.algorithms`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.algorithms import policy_losses, preference_losses
from engine.algorithms.aggregation import Denominators, accumulate_mean, aggregate, compute_means
from engine.algorithms.correction import GAP_PREFIXES, gap_metrics
from engine.algorithms.critic_loss import rows_with_gradient
from engine.algorithms.divergences import kl_estimate
from engine.batch import TOKENS, Batch
from engine.checkpoint.format import RankState
from engine.checkpoint.state_dict import StateDict
from engine.config import ActorConfig, DistillationConfig, LoRAConfig, PreferenceConfig
from engine.data.collate import token_budget_batches
from engine.errors import CheckpointError
from engine.models import forward
from engine.parallel import fsdp
from engine.parallel.layout import Layout
from engine.rollout.vllm.weight_broadcast import Member
from engine.runtime import sharded_model
from engine.runtime.optimizer import update_metrics
from engine.runtime.policy_runtime import PolicyRuntime, StartModel, save_ranks
from engine.runtime.sharded_model import Loss, Metrics, ShardedModel, init_mesh
from engine.runtime.train_state import ShardedTrainState, check_start, weights_fingerprint
from engine.weight_transfer import BroadcastRound, WeightSender
from engine.workers.algorithm_options import policy_loss_options, preference_options
from engine.workers.role import Dispatch, StatefulWorker, WorkerContext, dispatch

ResponseLoss = Callable[
    [forward.Outputs, Batch], preference_losses.PreferenceOutput
]  # of a micro-batch's responses


class TrainingWorker(StatefulWorker):
    """A role whose state is a model in training; another number of ranks may load it."""

    ranks_alike = True
    sharded: ShardedModel  # these two are set by the role's constructor
    train_state: ShardedTrainState
    config: Any  # the role's section

    def mini_batches(self, batch: Batch, unit: int = 1) -> Iterator[Batch]:
        """The rows of each optimizer step of an update; `unit` consecutive rows stay together."""
        config, units = self.config, torch.arange(len(batch)).view(-1, unit)
        size = config.ppo_mini_batch_size // unit
        ranks, generator = self.sharded.ranks, self.train_state.generator
        with self.sharded.on_device():
            for _ in range(config.ppo_epochs):
                for index in sharded_model.minibatch_indices(len(units), size, ranks, generator):
                    yield batch if len(index) == len(units) else batch.rows(units[index].flatten())

    def take_steps(
        self, batch: Batch, accumulate: Callable[[Batch], list[Metrics]], unit: int = 1
    ) -> dict[str, float]:
        """Step with the gradients that `accumulate` adds for each mini-batch; return metrics."""
        parts, norms = list[Metrics](), list[float]()
        for mini in self.mini_batches(batch, unit):
            parts += accumulate(mini)
            norms.append(self.train_state.optimizer.step())
        return self.finish_update(parts, norms)

    def finish_update(self, parts: list[Metrics], norms: list[float]) -> dict[str, float]:
        """The metrics of all ranks' micro-batches, and of the optimizer steps of an update."""
        metrics = compute_means(self.sharded.all_reduce_metrics(parts))
        return metrics | update_metrics(norms, self.train_state.optimizer.loss_scale)

    def accumulate(
        self, batch: Batch, micros: Sequence[Batch], reader: forward.OutputReader, loss: Loss
    ) -> list[Metrics]:
        """Add the gradients of `loss` over micro-batches of `batch`, summed over all ranks' rows.

        They are times the optimizer's `loss_scale`, where it has one. Returns the metrics of each
        micro-batch; of pipeline stages only the last has any: see `all_reduce_metrics`.
        """
        sharded, parts = self.sharded, list[Metrics]()
        passes = sharded.pad_passes(micros, batch)
        if sharded.has_stages:  # torch's schedule (1F1B) interleaves the passes, and calls the loss
            parts = sharded.train_stages(passes, len(micros), reader, loss)
        else:
            for number, micro in enumerate(passes):
                fsdp.reduce_over_copies(sharded.module, number == len(passes) - 1)
                with sharded.forward(micro, reader) as outputs:
                    if number >= len(micros):  # for collectives of ranks that have more rows
                        sharded_model.zero_loss(outputs).backward()
                        continue
                    value, metrics = loss(outputs, micro)
                    sharded.scaled(value).backward()
                parts.append(metrics)
        sharded.all_reduce_gradients()
        return parts

    def accumulate_rows(
        self, batch: Batch, reader: forward.OutputReader, loss: Loss, rows: Tensor | None = None
    ) -> list[Metrics]:
        """`accumulate` of a batch, or of its `rows`, in micro-batches within the token budget."""
        micros = self.sharded.micro_batches(batch, self.config.max_tokens_per_micro_batch, rows)
        return self.accumulate(batch, [micro for _, micro in micros], reader, loss)

    def accumulate_responses(
        self, batch: Batch, response_loss: ResponseLoss, reader: forward.OutputReader, *, unit: int
    ) -> list[Metrics]:
        """Add the gradients of the mean of `response_loss` over the real units of all ranks.

        A unit is `unit` consecutive rows, which get one loss together, such as a pair. One without
        response tokens is padding: it gets no pass and is not counted.
        """
        real = batch["response_mask"].bool().any(1).view(-1, unit).any(1).nonzero().squeeze(1)
        lengths = batch["attention_mask"].sum(1).view(-1, unit).max(1).values[real]
        units, within = self.sharded.global_count(len(real)), torch.arange(unit)
        # A micro-batch of N units has unit · N rows, as wide as the longest.
        budget, micros = max(1, self.config.max_tokens_per_micro_batch // unit), []
        for index in token_budget_batches(lengths.tolist(), budget):
            rows = (unit * real[index])[:, None] + within
            micros.append(sharded_model.trim(batch.rows(rows.flatten())))

        def loss(outputs: forward.Outputs, micro: Batch) -> tuple[Tensor, Metrics]:
            out = response_loss(outputs, micro)
            mean = accumulate_mean(out.loss, torch.ones_like(out.loss))
            return out.loss.sum() / units, dict(out.metrics) | {"loss": mean}

        return self.accumulate(batch, micros, reader, loss)

    def accumulate_pairs(
        self,
        batch: Batch,
        pair_loss: Callable[[preference_losses.Pairs], preference_losses.PreferenceOutput],
        reader: forward.OutputReader,
    ) -> list[Metrics]:
        """Add the gradients of the mean loss over all ranks' real pairs: of rows 2i, 2i+1."""

        def response_loss(
            outputs: forward.Outputs, micro: Batch
        ) -> preference_losses.PreferenceOutput:
            policy, length = preference_losses.sequence_log_probs(
                outputs["log_probs"], micro["response_mask"]
            )
            reference = micro.get("ref_response_log_probs")
            if "ref_log_probs" in micro:
                reference, _ = preference_losses.sequence_log_probs(
                    micro["ref_log_probs"], micro["response_mask"]
                )
            return pair_loss(as_pairs(policy, length, reference))

        return self.accumulate_responses(batch, response_loss, reader, unit=2)

    def state_dict(self) -> StateDict:
        """Weights, moments and the generator that shuffles mini-batches: this rank's part."""
        return self.train_state.state_dict()

    def load_sharded_state(self, own: RankState, saved: list[RankState]) -> None:
        """Restore what all ranks saved, in place: engines that share the weights see it too."""
        self.train_state.load(own, saved)

    def load_state_dict(self, state: StateDict) -> None:
        own = RankState.of(state)
        self.load_sharded_state(own, [own])


def as_pairs(policy: Tensor, length: Tensor, reference: Tensor | None) -> preference_losses.Pairs:
    """Pairs of rows 2i and 2i+1, chosen and rejected: log-probs and lengths of responses `[2N]`."""
    sides = {
        "policy_chosen": policy[0::2],
        "policy_rejected": policy[1::2],
        "chosen_length": length[0::2],
        "rejected_length": length[1::2],
    }
    if reference is not None:
        sides |= {"ref_chosen": reference[0::2], "ref_rejected": reference[1::2]}
    return preference_losses.Pairs(**sides)


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
        self.sender, self.member = WeightSender(cast, deltas=delta_sync), Member()
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
        return Batch(
            out
            | ({"routed_experts": sharded_model.untrimmed(batch, passes, chosen)} if chosen else {})
        )

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
        gaps = chain([gap], repeat(False))  # after a step the weights are not those that sampled
        return self.take_steps(batch, lambda mini: self._accumulate(mini, gap=next(gaps)))

    def _accumulate(self, mini: Batch, *, gap: bool = False) -> list[Metrics]:
        """Add the policy loss's gradients; rows without any count in the denominators alone."""
        config, mask = self.config, mini["response_mask"]
        active = rows_with_gradient(
            config.policy_loss.loss_mode,
            mini["advantages"],
            mask,
            entropy_coeff=config.entropy_coeff or config.router_aux_loss_coef,
            kl_loss_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        )
        skipped: Metrics = {"rows_skipped": accumulate_mean((~active).double(), mask.any(1))}
        denominators = self.sharded.global_counts(mask)
        if not self.sharded.any_rank_has(int(active.sum())):
            self.train_state.optimizer.zero_gradients()  # Adam's momentum still moves the weights
            return [skipped]
        rows = None if bool(active.all()) else active
        reference = None
        if config.use_kl_loss and config.kl_loss_type == "full":
            assert self.context.process.reference is not None, "the exact KL needs one here"
            reference = self.context.process.reference.logits
        reader = self._reader(
            entropy=True,
            entropy_gradient=config.entropy_coeff > 0,
            reference=reference,
            router_balance=config.router_aux_loss_coef > 0,
            replay=config.router_replay.mode != "disabled",
        )
        loss = partial(self._policy_loss, denominators=denominators, gap=gap)
        return [skipped, *self.accumulate_rows(mini, reader, loss, rows)]

    def _policy_loss(
        self, outputs: forward.Outputs, micro: Batch, *, denominators: Denominators, gap: bool
    ) -> tuple[Tensor, Metrics]:
        """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL (+ the routers' balance)."""
        config, mask = self.config, micro["response_mask"]
        tokens = forward.TokenOutputs(**outputs)
        assert tokens.entropy is not None
        policy_loss = policy_losses.get_policy_loss(config.policy_loss.loss_mode)
        out = policy_loss(
            tokens.log_probs,
            micro["old_log_probs"],
            micro["advantages"],
            mask,
            rollout_is_weights=micro.get("rollout_is_weights"),
            **self.loss_options,
            **{name: micro[name] for name in policy_loss.prepared},
        )
        loss = self._aggregate(out.loss, mask, denominators)
        metrics = {"pg_loss": accumulate_mean(out.loss, mask)} | dict(out.metrics)
        metrics["entropy"] = accumulate_mean(tokens.entropy, mask)
        if config.entropy_coeff:
            entropy = self._aggregate(tokens.entropy, mask, denominators)
            loss = loss - config.entropy_coeff * entropy
        kl = self._kl(tokens, micro)
        if kl is not None:
            metrics["kl"] = accumulate_mean(kl, mask)
            if config.use_kl_loss:
                loss = loss + config.kl_loss_coef * self._aggregate(kl, mask, denominators)
        if (balance := tokens.router_balance) is not None:
            metrics["router_aux_loss"] = accumulate_mean(balance, mask)
            mean = aggregate(balance, mask, "token-mean", denominators)
            loss = loss + config.router_aux_loss_coef * mean
        if gap:
            metrics |= gap_metrics(tokens.log_probs, micro["rollout_log_probs"], mask)
        return loss, metrics

    def _kl(self, tokens: forward.TokenOutputs, micro: Batch) -> Tensor | None:
        if tokens.full_kl is not None:
            return tokens.full_kl
        if "ref_log_probs" not in micro:
            return None
        kind = self.config.kl_loss_type if self.config.use_kl_loss else "low_var_kl"
        mask = micro["response_mask"]
        return kl_estimate(tokens.log_probs, micro["ref_log_probs"], kind, mask=mask)

    @dispatch(Dispatch.DATA_PARALLEL_METRICS, unit=2, pad=True)
    def update_pairs(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch of pairs: rows 2i are chosen, 2i+1 rejected.

        Reads `ref_log_probs [B, R]`, unless the preference loss has no reference.
        """
        options = preference_options(self.preference)
        pair_loss = partial(preference_losses.get_pair_loss(self.preference.loss), **options)
        return self.take_steps(
            batch, lambda mini: self.accumulate_pairs(mini, pair_loss, self._reader()), unit=2
        )

    @dispatch(Dispatch.DATA_PARALLEL_METRICS)
    def update_distilled(self, batch: Batch) -> dict[str, float]:
        """Take the optimizer steps of one batch on the divergence from its teachers.

        Reads `teacher_weights [B, T]` and, with `distillation.top_k`, `teacher_ids` and
        `teacher_log_probs`; without it the teachers are in this process.
        """
        config, teachers = self.distillation, self.context.process.teachers
        assert config.loss != "policy_gradient", "that is a policy gradient's update"
        reader = forward.DivergenceReader(
            self.temperature,
            config.loss,
            config.beta,
            teachers=() if config.top_k else [teacher.logits for teacher in teachers],
            skip=self.sharded.ranks.layout.world_size == 1,
        )

        def accumulate(mini: Batch) -> list[Metrics]:
            denominators = self.sharded.global_counts(mini["response_mask"])
            loss = partial(self._divergence_loss, denominators=denominators)
            return self.accumulate_rows(mini, reader, loss)

        return self.take_steps(batch, accumulate)

    def _divergence_loss(
        self, outputs: forward.Outputs, micro: Batch, *, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        mask, names = micro["response_mask"], ("divergence", "entropy")
        metrics = {name: accumulate_mean(outputs[name].detach(), mask) for name in names}
        return self._aggregate(outputs["divergence"], mask, denominators), metrics

    @dispatch(Dispatch.ONE_TO_ALL)
    def skip_update(self) -> dict[str, float]:
        """Leave the policy as it is for a step, and raise its version all the same."""
        self.policy.version += 1
        return {}

    def finish_update(self, parts: list[Metrics], norms: list[float]) -> dict[str, float]:
        self.policy.version += 1
        metrics = super().finish_update(parts, norms) | {"lr": self.train_state.optimizer.lr}
        return {k if k.startswith(GAP_PREFIXES) else f"actor/{k}": v for k, v in metrics.items()}

    def _reader(self, **options: Any) -> forward.LogProbReader:
        return forward.LogProbReader(
            self.temperature, statistics=self.sharded.statistics(), **options
        )

    def _aggregate(self, values: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
        scale_factor = self.config.loss_scale_factor
        return aggregate(values, mask, self.loss_agg_mode, denominators, scale_factor=scale_factor)

    @dispatch(Dispatch.ONE_TO_ALL)
    def weights(self) -> Batch:
        """What is trained of the weights, and its version, for rollout in other processes."""
        return self.policy.pack_weights(self.sender)

    @dispatch(Dispatch.RANK_ZERO)
    def weights_delta(self) -> Batch:
        """What the last `weights` changed of those before, where the worker syncs by deltas."""
        return self.sender.delta()

    @dispatch(Dispatch.ONE_TO_ALL)
    def broadcast_weights(self, broadcast: BroadcastRound) -> None:
        """Send the full weights to all samplers of a round; raise WeightSyncError if that fails."""
        self.policy.broadcast_weights(self.member, broadcast, self.sender.dtype)

    @dispatch(Dispatch.ONE_TO_ALL)
    def save(self, folder: str) -> str:
        save_ranks(self.policy, self._start_model, Path(folder))
        return folder

    def state_dict(self) -> StateDict:
        own = {"policy_version": self.policy.version, "start": self.start}
        if self.lora.rank:
            own |= {"lora_alpha": self.lora.alpha}
        return super().state_dict() | own

    def load_sharded_state(self, own: RankState, saved: list[RankState]) -> None:
        """As its base; raises CheckpointError for another model, and for another alpha."""
        alpha = own.get("lora_alpha")
        if alpha is not None and self.lora.rank and alpha != self.lora.alpha:  # not seen in shapes
            raise CheckpointError(
                f"the checkpoint's adapters have model.lora.alpha={alpha}, this run has "
                f"{self.lora.alpha}; resume with the alpha that was saved"
            )
        self.train_state.check(saved)
        check_start(own, self.start, self.tokenizer_path)
        super().load_sharded_state(own, saved)
        self.policy.version = own.get("policy_version")
