"""The roles of frozen models beside the policy: the reference, and the teachers of distillation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.algorithms.divergences import rest_of
from engine.batch import TOKENS, Batch
from engine.config import DistillationConfig, ParallelConfig, TeacherConfig
from engine.errors import RolloutError
from engine.models import has_adapters, open_model, text_config
from engine.models.forward import LogProbReader, Outputs, ReferenceLogits, TopKReader
from engine.models.packing import left_align
from engine.parallel.layout import Layout
from engine.rollout.server.api import PromptLogProbs, TokenLogProbs
from engine.runtime.sharded_model import ShardedModel, init_mesh
from engine.workers.role import Dispatch, Worker, WorkerContext, dispatch


class ReferenceWorker(Worker):
    """The policy before RL; of a policy with adapters beside it, the one without them."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        temperature: float,
        max_tokens_per_micro_batch: int,
        dtype: str = "float32",
        base_of_policy: bool = False,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(context)
        self.temperature, self.budget = temperature, max_tokens_per_micro_batch
        policy = context.process.policy if base_of_policy else None
        if policy is not None and has_adapters(policy.module):
            self.sharded = policy.sharded.without_adapters()
        else:
            self.sharded = _load_frozen(context, model_path, dtype, parallel)
        if context.role == "reference":
            context.process.reference = self.sharded

    @dispatch(Dispatch.DATA_PARALLEL, pad=True, reads=TOKENS, writes=("ref_log_probs",))
    def log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs [B, R]`."""
        return Batch({"ref_log_probs": self._outputs(batch, self.sharded, None)["log_probs"]})

    @dispatch(Dispatch.DATA_PARALLEL, reads=TOKENS, writes=("ref_kl",))
    def full_kl(self, batch: Batch) -> Batch:
        """`ref_kl [B, R]`: exact KL of the process's policy, as it is now, from this model."""
        policy = self.context.process.policy
        assert policy is not None, "full_kl needs an actor in the same process"
        outputs = self._outputs(batch, policy.sharded, self.sharded.logits)
        return Batch({"ref_kl": outputs["full_kl"]})

    def _outputs(
        self, batch: Batch, sharded: ShardedModel, reference: ReferenceLogits | None
    ) -> Outputs:
        reader = LogProbReader(
            self.temperature, statistics=sharded.statistics(), reference=reference
        )
        return sharded.read(batch, self.budget, reader)


def _load_frozen(
    context: WorkerContext, path: str, dtype: str, parallel: ParallelConfig | None
) -> ShardedModel:
    parallel = parallel or ParallelConfig()
    ranks = init_mesh(Layout.of(parallel), context.rank, context.world_size, context.address)
    return ShardedModel(open_model(path, dtype).requires_grad_(False), ranks, parallel)


_READS = (*TOKENS, "teacher_weights")


class TeacherWorker(Worker):
    """Asks teachers about completions: models on the actor's ranks, or servers.

    `teacher_weights [B, T]` is the share of each of T teachers in a row's loss. Where each row has
    one teacher (`algorithm.distillation.route_by`), that one alone is asked.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        model_path: str,
        teachers: Sequence[TeacherConfig],
        settings: DistillationConfig,
        temperature: float,
        max_tokens_per_micro_batch: int,
        dtype: str = "float32",
        parallel: ParallelConfig | None = None,
    ) -> None:
        """`model_path` is the student's; raises RolloutError for a server that isn't there."""
        super().__init__(context)
        self.settings, self.vocabulary = settings, int(text_config(model_path).vocab_size)
        self.teachers = list[LoadedTeacher | ServedTeacher]()
        budget = max_tokens_per_micro_batch
        for i, teacher in enumerate(teachers):
            if teacher.url:
                section = f"algorithm.distillation.teachers[{i}]"
                self.teachers.append(ServedTeacher(teacher, section, self.vocabulary))
                continue
            sharded = _load_frozen(context, teacher.model, dtype, parallel)
            self.teachers.append(LoadedTeacher(sharded, self.vocabulary, temperature, budget))
            context.process.teachers.append(sharded)

    @dispatch(Dispatch.DATA_PARALLEL, pad=True, reads=_READS, writes=("ref_log_probs",))
    def log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs [B, R]`: of each row's teachers, the mean by weight."""
        weights = batch["teacher_weights"]
        out = torch.zeros(batch["responses"].shape)
        for i, teacher in enumerate(self.teachers):
            rows = _rows(teacher, weights[:, i])
            if len(rows):
                out[rows] += weights[rows, i, None] * teacher.log_probs(batch.rows(rows))
        return Batch({"ref_log_probs": out})

    @dispatch(
        Dispatch.DATA_PARALLEL,
        pad=True,
        reads=_READS,
        writes=("teacher_ids", "teacher_log_probs", "teacher_weights"),
    )
    def top_k(self, batch: Batch) -> Batch:
        """`teacher_ids [B, R, T·K]`, `teacher_log_probs [B, R, T·(K+1)]`, `teacher_weights [B, T]`.

        With a teacher a row T is 1 in them.
        """
        weights, shape = batch["teacher_weights"], batch["responses"].shape
        k = min(self.settings.top_k, self.vocabulary)
        routed = bool(self.settings.route_by)
        count = 1 if routed else len(self.teachers)
        ids = torch.zeros((*shape, count, k), dtype=torch.int32)
        log_probs = torch.zeros((*shape, count, k + 1))
        for i, teacher in enumerate(self.teachers):
            rows = _rows(teacher, weights[:, i])
            if not len(rows):
                continue
            own, slot = weights[rows, i] > 0, 0 if routed else i  # ranks together ask about all
            top_ids, top_log_probs = teacher.top_k(batch.rows(rows), k)
            ids[rows[own], :, slot] = top_ids[own]
            log_probs[rows[own], :, slot] = top_log_probs[own]
        return Batch(
            {
                "teacher_ids": ids.flatten(2),
                "teacher_log_probs": log_probs.flatten(2),
                "teacher_weights": torch.ones(len(batch), 1) if routed else weights,
            }
        )

    def close(self) -> None:
        for teacher in self.teachers:
            if isinstance(teacher, ServedTeacher):
                teacher.server.close()
        super().close()


class LoadedTeacher:
    together: bool  # ranks ask it together, about all rows

    def __init__(
        self, sharded: ShardedModel, vocabulary: int, temperature: float, budget: int
    ) -> None:
        self.sharded, self._vocabulary = sharded, vocabulary
        self.together = sharded.ranks.layout.world_size > 1
        self._temperature, self._budget = temperature, budget

    def log_probs(self, batch: Batch) -> Tensor:
        reader = LogProbReader(self._temperature, statistics=self.sharded.statistics())
        return self.sharded.read(batch, self._budget, reader)["log_probs"]

    def top_k(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens `[B, R, K]`, and log-probs `[B, R, K+1]`, the last of all others."""
        reader = TopKReader(self._temperature, k, self._vocabulary)
        out = self.sharded.read(batch, self._budget, reader)
        return out["teacher_ids"], out["teacher_log_probs"]


class ServedTeacher:
    together = False

    def __init__(self, config: TeacherConfig, section: str, vocabulary: int) -> None:
        self.server, self._vocabulary = PromptLogProbs(config, section), vocabulary
        self._section = section

    def log_probs(self, batch: Batch) -> Tensor:
        out = torch.zeros(batch["responses"].shape)
        for row, tokens in enumerate(self._ask(batch, 0)):
            out[row, : len(tokens)] = torch.tensor([token.log_prob for token in tokens])
        return out

    def top_k(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        shape = batch["responses"].shape
        ids = torch.zeros((*shape, k), dtype=torch.int32)
        log_probs = torch.zeros((*shape, k + 1))
        for row, tokens in enumerate(self._ask(batch, k)):
            columns = range(len(tokens))
            ids[row, columns] = torch.tensor([[t for t, _ in token.top] for token in tokens]).int()
            known = torch.tensor([[value for _, value in token.top] for token in tokens])
            log_probs[row, columns] = torch.cat([known, rest_of(known)[:, None]], 1)
        if int(ids.max()) >= self._vocabulary:
            raise RolloutError(
                f"{self._section}.url gave the token {int(ids.max())}, and the model has "
                f"{self._vocabulary}; serve a teacher of the same vocabulary"
            )
        return ids, log_probs

    def _ask(self, batch: Batch, k: int) -> list[list[TokenLogProbs]]:
        seqs = left_align(batch)
        assert seqs.lengths is not None
        assert seqs.prompts is not None
        rows = zip(seqs.input_ids.tolist(), seqs.lengths.tolist(), strict=True)
        return self.server.read([row[:length] for row, length in rows], seqs.prompts.tolist(), k)


def _rows(teacher: LoadedTeacher | ServedTeacher, weights: Tensor) -> Tensor:
    """The rows `[n]` that a teacher is asked about, of its weights `[B]`."""
    return torch.arange(len(weights)) if teacher.together else weights.nonzero()[:, 0]
