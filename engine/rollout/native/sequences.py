"""Requests, and a table with the sampled tokens of the sequences that are decoded for them.

A request is a prompt and its completions; a sequence is one completion from its admission to its
end or preemption. The table lies on the model's device, one row a sequence, and becomes Python
lists when sequences leave it. `plan_prefill` says what is computed to admit completions.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.errors import DivergedRolloutError
from engine.rollout.protocol import Completion, SamplingParams, TokenLists
from engine.rollout.sampling import noise_keys
from engine.rollout.stream import PartialCompletion, PartialRequest


@dataclass(slots=True)
class Request:
    """A prompt to complete; `waiting` are its completions that no row of the table has."""

    key: Hashable
    name: str  # in messages, e.g. "prompt 3"
    prompt_ids: list[int]
    number: int  # place among the requests of its engine call or stream
    noise_index: int  # stands for the prompt in the sampling noise
    max_tokens: int  # length limit of its completions
    unfinished: int  # completions that have not ended
    waiting: list[PartialCompletion]  # by completion_index
    after: Hashable | None = None  # key of the request whose sequence the prompt begins with
    cut: bool = False  # its completions end with their next token


Admitted = list[tuple[Request, list[PartialCompletion]]]  # requests with completions of theirs


class FinishedSequence(NamedTuple):
    request: Request
    completion_index: int
    completion: Completion


class SequenceTable:
    """Tokens and log-probs of up to `capacity` sequences; row `capacity` takes what is dropped."""

    def __init__(
        self,
        capacity: int,
        params: SamplingParams,
        columns: int,
        device: torch.device,
        *,
        version: int,
        track_versions: bool,
        longest_prompt: int = 0,
    ) -> None:
        """Hold sequences of at most `columns` sampled tokens, drawn from policy `version`.

        `track_versions`: of each token. `longest_prompt`: in tokens, where experts are recorded.
        """
        self._experts: Tensor | None = None  # [rows, tokens, layers · k], with the first recorded
        self._longest = longest_prompt + columns
        self.device, self.capacity, self.version = device, capacity, version
        self.finished = 0  # sequences that have ended so far
        rows = capacity + 1
        self.keys = torch.zeros(rows, dtype=torch.long, device=device)  # of the sampling noise
        self.prompt_lengths = torch.zeros_like(self.keys)
        self._params = params
        self._limits = torch.full_like(self.keys, columns + 1)  # the spare row never ends
        self._lengths = torch.zeros_like(self.keys)  # tokens so far
        self._stop = torch.tensor(params.stop_token_ids, dtype=torch.long, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self._tokens = torch.zeros((rows, columns), dtype=torch.long, device=device)
        self._log_probs = torch.zeros((rows, columns), dtype=torch.float32, device=device)
        self._versions: Tensor | None = None
        if track_versions:
            self._versions = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self._owners: dict[int, tuple[Request, int]] = {}  # row → request, completion_index
        self._free = list(range(capacity))[::-1]
        self._ended: list[int] = []  # rows that ended and were not taken out

    @property
    def running(self) -> int:
        """Sequences that have not ended."""
        return len(self._owners) - len(self._ended)

    def add(self, members: Sequence[tuple[Request, PartialCompletion]]) -> list[int]:
        """Give each member a row, in order, with the tokens it has; return the rows."""
        rows = self._free[: -len(members) - 1 : -1]
        index = torch.tensor(rows, device=self.device)

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=self.device)

        prompts = column([request.noise_index for request, _ in members])
        indices = column([part.completion_index for _, part in members])
        self.keys[index] = noise_keys(self._params.seed, prompts, indices)
        self.prompt_lengths[index] = column([len(request.prompt_ids) for request, _ in members])
        self._limits[index] = column(
            [len(part.token_ids) + 1 if r.cut else r.max_tokens for r, part in members]
        )
        self._lengths[index] = column([len(part.token_ids) for _, part in members])
        self._stopped[index] = False
        for row, (request, part) in zip(rows, members, strict=True):
            self._owners[row] = request, part.completion_index
            if count := len(part.token_ids):
                self._tokens[row, :count] = torch.tensor(part.token_ids)
                self._log_probs[row, :count] = torch.tensor(part.log_probs)
                if self._versions is not None:
                    versions = torch.tensor(part.token_versions, dtype=torch.int32)
                    self._versions[row, :count] = versions
        del self._free[-len(members) :]
        return rows

    def cut(self, request: Request) -> None:
        """Let the request's sequences end with their next token."""
        rows = [row for row in self._unended() if self._owners[row][0] is request]
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self._limits[index] = self._lengths[index] + 1

    def owner(self, row: int) -> Request:
        return self._owners[row][0]

    def record(self, rows: Tensor, column: Tensor, token: Tensor, log_prob: Tensor) -> Tensor:
        """Store a token a row; return which ended, bool `[R]`. DivergedRolloutError for a NaN."""
        self._tokens[rows, column] = token
        self._log_probs[rows, column] = log_prob
        is_sequence = rows < self.capacity
        ended_mask = column + 1 >= self._limits[rows]
        stop = None
        if len(self._stop):
            stop = token == self._stop if len(self._stop) == 1 else torch.isin(token, self._stop)
            stop &= is_sequence
            ended_mask |= stop
        bad = log_prob.isnan() & is_sequence
        ended, wrong = torch.stack((ended_mask.sum(), bad.sum())).tolist()
        if wrong:
            request, index = self._owners[int(rows[bad][0])]
            raise DivergedRolloutError(
                f"the model gave NaN logits for {wrong} rows, the first being completion {index} "
                f"of {request.name}; its weights have diverged: go back to a checkpoint and lower "
                f"the learning rate"
            )
        if self._versions is not None:
            self._versions[rows, column] = self.version
        self._lengths[rows] = column + 1
        if ended:
            self.finished += ended
            ended_rows = rows[ended_mask]
            self._ended += ended_rows.tolist()
            if stop is not None:
                self._stopped[ended_rows] = stop[ended_mask]
        return ended_mask

    def record_prompt_experts(self, rows: Tensor, chosen: Tensor) -> None:
        """Store the experts `[R, P, K]` of the prompts of `rows`, which end at P."""
        if self._experts is None:
            size = (self.capacity + 1, self._longest, chosen.shape[2])
            self._experts = chosen.new_zeros(size)
        lengths = self.prompt_lengths[rows]
        columns = torch.arange(chosen.shape[1], device=self.device)
        present = columns >= chosen.shape[1] - lengths[:, None]  # [R, P]
        first = chosen.shape[1] - lengths
        at = present.nonzero()
        self._experts[rows[at[:, 0]], at[:, 1] - first[at[:, 0]]] = chosen[present]

    def record_experts(self, rows: Tensor, positions: Tensor, chosen: Tensor) -> None:
        """Store the experts `[R, K]` of the tokens at `positions` of the sequences of `rows`."""
        assert self._experts is not None, "prompts come first"
        self._experts[rows, positions] = chosen

    def _routed_experts(self, row: int, sampled: int) -> Tensor | None:
        """Return the experts of prompt and completion but the last token, which was never fed."""
        if self._experts is None:
            return None
        count = int(self.prompt_lengths[row]) + sampled - 1
        return self._experts[row, :count].to("cpu", copy=True)

    def take_finished(self) -> list[FinishedSequence]:
        """Take out the sequences that ended, in the order of their ends."""
        rows, self._ended = self._ended, []
        if not rows:
            return []
        stopped = self._stopped[torch.tensor(rows, device=self.device)].tolist()
        finished = []
        self._free += rows
        for row, part, stop in zip(rows, self._read_rows(rows), stopped, strict=True):
            request, index = self._owners.pop(row)
            request.unfinished -= 1
            versions = part.token_versions
            completion = Completion(
                prompt_index=request.number,
                token_ids=part.token_ids,
                log_probs=part.log_probs,
                finish_reason="stop" if stop else "length",
                policy_version=min(versions, default=self.version),
                token_versions=versions or None,
                routed_experts=self._routed_experts(row, len(part.token_ids)),
            )
            finished.append(FinishedSequence(request, index, completion))
        return finished

    def preempt(self) -> list[Request]:
        """Take out the sequences that have not ended; they wait in their requests, oldest first."""
        rows, groups = self._unended(), self._unfinished()
        self._free += rows
        for row in rows:
            del self._owners[row]
        for request, parts in groups:
            request.waiting = sorted([*request.waiting, *parts], key=_completion_index)
        return [request for request, _ in groups]

    def partials(self) -> list[PartialRequest]:
        """Copy the sequences that have not ended, by request, the oldest first."""
        return [PartialRequest(r.key, r.prompt_ids, parts) for r, parts in self._unfinished()]

    def _unfinished(self) -> Admitted:
        rows = self._unended()
        groups: dict[int, tuple[Request, list[PartialCompletion]]] = {}
        for row, part in zip(rows, self._read_rows(rows), strict=True):
            request, _ = self._owners[row]
            groups.setdefault(request.number, (request, []))[1].append(part)
        ordered = [groups[number] for number in sorted(groups)]
        return [(request, sorted(parts, key=_completion_index)) for request, parts in ordered]

    def _unended(self) -> list[int]:
        ended = set(self._ended)
        return [row for row in self._owners if row not in ended]

    def _read_rows(self, rows: list[int]) -> list[PartialCompletion]:
        if not rows:
            return []
        index = torch.tensor(rows, device=self.device)
        lengths = self._lengths[index].tolist()
        longest = max(lengths)

        def lists(table: Tensor) -> list[list[Any]]:
            values = table[index, :longest].tolist()
            return [row[:length] for row, length in zip(values, lengths, strict=True)]

        indices = [self._owners[row][1] for row in rows]
        versions = [[]] * len(rows) if self._versions is None else lists(self._versions)
        columns = (indices, lists(self._tokens), lists(self._log_probs), versions)
        return [PartialCompletion(*fields) for fields in zip(*columns, strict=True)]


_completion_index = attrgetter("completion_index")

_PREFILL_TOKENS = 16384  # padded tokens of one forward pass


@dataclass(slots=True)
class PrefillPlan:
    """What is computed to admit R completions; lists but `prompts` have one entry a completion."""

    prompts: list[list[int]] = field(default_factory=list)  # token sequences, each computed once
    which: list[int] = field(default_factory=list)  # its prompt, ascending
    tails: list[list[int]] = field(default_factory=list)  # what follows the prompt, sampled before
    sampled: list[int] = field(default_factory=list)  # number of tokens it has
    latest: list[int] = field(default_factory=list)  # the last of them, not fed to the model yet


def plan_prefill(admitted: Admitted, shares_prompts: bool) -> PrefillPlan:
    """Plan the prefill of `admitted`, in order.

    Where completions share prompts, a request's prompt is computed once. Otherwise a resumed one is
    computed as a whole, all but the latest token; what equals the one before it is computed once.
    """
    plan = PrefillPlan()
    for request, parts in admitted:
        for part in parts:
            prompt, tail = request.prompt_ids, part.token_ids[:-1]
            if tail and not shares_prompts:
                prompt, tail = prompt + tail, []
            last = plan.prompts[-1] if plan.prompts else None
            if last is not prompt and (shares_prompts or last != prompt):
                plan.prompts.append(prompt)
            plan.which.append(len(plan.prompts) - 1)
            plan.tails.append(tail)
            plan.sampled.append(len(part.token_ids))
            plan.latest.append(part.token_ids[-1] if part.token_ids else 0)
    return plan


def prefill_spans(sequences: TokenLists) -> Iterator[tuple[int, int]]:
    """Cut `sequences` into runs (low, high) that are padded and computed in one forward pass."""
    first = widest = 0
    for high, sequence in enumerate(sequences):
        widest = max(widest, len(sequence))
        if high > first and widest * (high + 1 - first) > _PREFILL_TOKENS:
            yield first, high
            first, widest = high, len(sequence)
    if sequences:
        yield first, len(sequences)
