"""The rows of a stream: which completion a row is, its tokens and their versions, and its leaving.

A row is one completion from its seating to its end, interruption or re-seating; its number is used
again afterwards. Which requests are seated when is the business of `stream.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.rollout.native.rows import RowTable
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.sampling import row_keys
from engine.rollout.stream import Partial, PartialCompletion, StreamedCompletion


@dataclass(slots=True)
class Request:
    """A submitted prompt; its open completions are all seated, or all in `parts`."""

    key: Hashable
    prompt_ids: list[int]
    number: int  # place among the stream's submissions
    draw: int  # stands for the key in the draws, see `stream.draw_number`
    limit: int  # tokens that end a completion of it
    open: int  # completions that have not ended
    parts: list[PartialCompletion]  # completions that are not seated, by completion_index

    def partial(self) -> Partial:
        """What is unfinished, for the caller to keep."""
        return Partial(self.key, self.prompt_ids, self.parts)


class StreamRows(RowTable):
    """A table of `slots` rows; `version` is that of the tokens to come."""

    def __init__(
        self, slots: int, params: SamplingParams, columns: int, device: torch.device
    ) -> None:
        super().__init__(slots, params, columns, device)
        self.version = 0
        self._versions = torch.zeros((slots + 1, columns), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(slots + 1, dtype=torch.long, device=device)  # tokens so far
        self._stopped = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        self._seated: dict[int, tuple[Request, int]] = {}  # row → request, completion_index
        self._free = list(range(slots))[::-1]
        self._ended: list[int] = []  # rows that ended and were not harvested

    @property
    def active(self) -> int:
        """Rows that have not ended."""
        return len(self._seated) - len(self._ended)

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Give a row to each of the requests' parts, in order, with the tokens they have."""
        members = [(request, part) for request in requests for part in request.parts]
        rows = self._free[: -len(members) - 1 : -1]
        index = torch.tensor(rows, device=self.device)

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=self.device)

        draws = column([request.draw for request, _ in members])
        indices = column([part.completion_index for _, part in members])
        self.keys[index] = row_keys(self._params.seed, draws, indices)
        self.prompt_lengths[index] = column([len(request.prompt_ids) for request, _ in members])
        self._limit[index] = column([request.limit for request, _ in members])
        self._lengths[index] = column([len(part.token_ids) for _, part in members])
        self._stopped[index] = False
        for row, (_, part) in zip(rows, members, strict=True):
            if have := len(part.token_ids):
                self._tokens[row, :have] = torch.tensor(part.token_ids)
                self._log_probs[row, :have] = torch.tensor(part.log_probs)
                self._versions[row, :have] = torch.tensor(part.token_versions, dtype=torch.int32)
        for row, (request, part) in zip(rows, members, strict=True):
            self._seated[row] = request, part.completion_index
        del self._free[-len(members) :]
        for request in requests:
            request.parts = []
        return rows

    def record(self, rows: Tensor, column: Tensor, token: Tensor, log_prob: Tensor) -> Tensor:
        """Store a token of each of `rows`; see `RowTable.record`."""
        done = super().record(rows, column, token, log_prob)
        self._versions[rows, column] = self.version
        self._lengths[rows] = column + 1
        return done

    def harvest(self) -> list[StreamedCompletion]:
        """Take out the completions that ended, in the order of their ends."""
        rows, self._ended = self._ended, []
        if not rows:
            return []
        stopped = self._stopped[torch.tensor(rows, device=self.device)].tolist()
        found = []
        for row, part, stop in zip(rows, self._take(rows), stopped, strict=True):
            request, index = self._seated.pop(row)
            request.open -= 1
            completion = Completion(
                prompt_index=request.number,
                token_ids=part.token_ids,
                log_probs=part.log_probs,
                finish_reason="stop" if stop else "length",
                policy_version=min(part.token_versions),
                token_versions=part.token_versions,
            )
            found.append(StreamedCompletion(request.key, index, completion))
        return found

    def evacuate(self) -> list[Request]:
        """Take out the rows that have not ended, as requests whose `parts` hold their tokens."""
        rows = [row for row in self._seated if row not in set(self._ended)]
        requests: dict[int, Request] = {}
        for row, part in zip(rows, self._take(rows), strict=True):
            request, _ = self._seated.pop(row)
            request.parts.append(part)
            requests[request.number] = request
        for request in requests.values():
            request.parts.sort(key=lambda part: part.completion_index)
        return [requests[number] for number in sorted(requests)]

    def partials(self) -> list[Partial]:
        """Copies of the requests with rows that have not ended; these go on."""
        rows = [row for row in self._seated if row not in set(self._ended)]
        found: dict[int, tuple[Request, list[PartialCompletion]]] = {}
        for row, part in zip(rows, self._read(rows), strict=True):
            request, _ = self._seated[row]
            found.setdefault(request.number, (request, []))[1].append(part)
        return [
            Partial(r.key, r.prompt_ids, sorted(parts, key=lambda part: part.completion_index))
            for _, (r, parts) in sorted(found.items())
        ]

    def _take(self, rows: list[int]) -> list[PartialCompletion]:
        """Read `rows` and free them."""
        found = self._read(rows)
        self._free += rows
        return found

    def _read(self, rows: list[int]) -> list[PartialCompletion]:
        if not rows:
            return []
        index = torch.tensor(rows, device=self.device)
        lengths = self._lengths[index].tolist()
        longest = max(lengths)
        tables = (self._tokens, self._log_probs, self._versions)
        columns = [table[index, :longest].tolist() for table in tables]
        return [
            PartialCompletion(self._seated[row][1], *(values[:length] for values in lists))
            for row, length, *lists in zip(rows, lengths, *columns, strict=True)
        ]

    def _name(self, row: int) -> str:
        request, index = self._seated[row]
        return f"completion {index} of request {request.key!r}"

    def _end(self, rows: Tensor, lengths: Tensor, stopped: Tensor | None) -> None:
        self._ended += rows.tolist()
        if stopped is not None:
            self._stopped[rows] = stopped
