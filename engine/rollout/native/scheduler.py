"""Continuous batching: requests wait in a queue, and their completions are admitted to free slots.

`Slots` are the sequences that are decoded together. All their state is in tensors with one entry a
slot; Python sees a step only as a few counts. A finished sequence stays in its slot until another
one takes it, or until enough have finished to be worth closing the gaps. Few numbers of slots are
ever computed: oneDNN compiles a kernel for each new shape of a product, which takes a millisecond.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.rollout.native.decoder import Decoder, Prefilled
from engine.rollout.native.kv_cache import KeptPrefix, KeptPrefixes
from engine.rollout.native.sequences import (
    Admitted,
    PrefillPlan,
    Request,
    SequenceTable,
    plan_prefill,
    prefill_spans,
)
from engine.rollout.protocol import SamplingParams
from engine.rollout.sampling import draw
from engine.rollout.stream import PartialRequest

OnEnd = Callable[[Tensor, Tensor, Tensor], None]  # rows, slots and fed tokens [k] of what ended


@dataclass(slots=True)
class RolloutStats:
    """What the latest `generate`, or a stream so far, has computed."""

    prefill_tokens: int = 0  # of prompts, each once where its group shares them
    decode_steps: int = 0  # forward passes after prefill


class Slots:
    """Up to `count` sequences of a table in decoding."""

    def __init__(
        self,
        decoder: Decoder,
        table: SequenceTable,
        params: SamplingParams,
        count: int,
        stats: RolloutStats,
        on_end: OnEnd | None = None,
    ) -> None:
        """Decode with `decoder`; `on_end` is called while what ended is still in its slots."""
        self.decoder, self._table, self._params = decoder, table, params
        self._on_end = on_end
        self.count, self._stats = count, stats
        self._used = self._finished = 0  # slots in use, and those of them that have finished
        # One entry a slot; a finished slot's row is the spare one, and its column is 0.
        self._row = torch.full((count,), table.capacity, device=table.device)
        self._column = torch.zeros_like(self._row)  # of the next token, within its completion
        self._position = torch.zeros_like(self._row)  # of the latest token, within its sequence
        self._token = torch.zeros_like(self._row)  # latest token, not fed to the model yet

    @property
    def free(self) -> int:
        return self.count - self.running

    @property
    def running(self) -> int:
        return self._used - self._finished

    def allocate(self, count: int) -> Tensor:
        """Reserve `count` free slots; `assign` must follow for each of them."""
        finished = self._finished_slots()
        unused = torch.arange(self._used, self.count, device=finished.device)
        self._finished -= min(len(finished), count)
        self._used += max(0, count - len(finished))
        return torch.cat((finished, unused))[:count]

    def running_slots(self) -> Tensor:
        """Return the slots that are assigned to a sequence, ascending."""
        return (self._row < self._table.capacity).nonzero()[:, 0]

    def assign(self, slots: Tensor, rows: Tensor) -> None:
        """Give `slots` `[k]` to the sequences in `rows` `[k]` of the table, without tokens yet."""
        self._row[slots] = rows
        self._column[slots] = 0
        self._position[slots] = self._table.prompt_lengths[rows] - 1

    def resume(self, slots: Tensor, columns: Tensor, tokens: Tensor) -> None:
        """Continue assigned sequences at `columns` `[k]` after their latest `tokens` `[k]`."""
        self._column[slots] = columns
        self._position[slots] += columns
        self._token[slots] = tokens

    def step(self) -> None:
        used = self._used
        columns = (self._column[:used] - 1).clamp(min=0)  # a finished slot's may be anything
        logits = self.decoder.decode(self._token[:used], self._position[:used], columns)
        self._stats.decode_steps += 1
        if (chosen := self.decoder.routed_experts) is not None:
            self._table.record_experts(self._row[:used], self._position[:used], chosen)
        self.sample(logits, slice(0, used))

    def sample(self, logits: Tensor, slots: Tensor | slice) -> None:
        """Sample a token for each of `slots`, record it, and free the slots of those that end."""
        table = self._table
        row, column = self._row[slots], self._column[slots]
        token, log_prob = draw(logits, table.keys[row], column, self._params)
        self.decoder.sync_samples(token, log_prob)
        finished_before = table.finished
        ended_mask = table.record(row, column, token, log_prob)
        is_sequence = row < table.capacity
        position = self._position[slots] + is_sequence
        column = column + is_sequence
        ended = table.finished - finished_before
        if ended:
            if self._on_end is not None:
                ended_slots = torch.arange(self.count, device=row.device)[slots][ended_mask]
                self._on_end(row[ended_mask], ended_slots, self._position[slots][ended_mask] + 1)
            self._row[slots] = row.masked_fill(ended_mask, table.capacity)
            column = column.masked_fill(ended_mask, 0)
            position = position.masked_fill(ended_mask, 0)
            self._finished += ended
        self._token[slots], self._column[slots], self._position[slots] = token, column, position

    def compact(self) -> None:
        """Close the gaps that finished sequences leave, once they are worth the copying."""
        running = self.running
        step = 1 << max(2, running.bit_length() - 4)  # of eight numbers an octave, at least
        slots_needed = -(-running // step) * step
        if slots_needed >= self._used:
            return
        running_slots = self.running_slots()
        tail = running_slots[running_slots >= slots_needed]
        gaps = self._finished_slots()[: len(tail)]
        self.decoder.move(tail, gaps, slots_needed)
        for state in (self._row, self._column, self._position, self._token):
            state[gaps] = state[tail]
        self._row[slots_needed:] = self._table.capacity
        self._used, self._finished = slots_needed, slots_needed - running

    def _finished_slots(self) -> Tensor:
        return (self._row[: self._used] == self._table.capacity).nonzero()[:, 0]


class Scheduler:
    """A queue of requests and the batch that they are decoded in."""

    def __init__(
        self,
        table: SequenceTable,
        params: SamplingParams,
        max_num_seqs: int,
        stats: RolloutStats,
        *,
        split_requests: bool,
        prefixes: KeptPrefixes | None = None,
    ) -> None:
        """Decode at most `max_num_seqs` sequences at once.

        `split_requests`: completions of one request may be admitted at different times; else only
        those of one that needs more than all slots. `prefixes`, for n=1: requests continue from it.
        """
        self._table, self._params, self._stats = table, params, stats
        self._max_num_seqs, self._split_requests = max_num_seqs, split_requests
        self._queue: deque[Request] = deque()
        self._slots: Slots | None = None
        self._carried: tuple[Request, Prefilled] | None = None  # a split request, its prompt
        self._prefixes = prefixes
        self._ended: dict[int, Tensor] = {}  # keys and values by number of their request
        self.waiting = 0  # completions in the queue

    @property
    def decoder(self) -> Decoder | None:
        """The decoder of the sequences; None from the start, and from `preempt`, to `bind`."""
        return None if self._slots is None else self._slots.decoder

    def bind(self, decoder: Decoder) -> None:
        """Decode with `decoder`, in which no slot is used; nothing may be running."""
        count = min(self._max_num_seqs, decoder.slots)
        on_end = None if self._prefixes is None else self._keep
        self._slots = Slots(decoder, self._table, self._params, count, self._stats, on_end)

    def add(self, request: Request) -> None:
        self._queue.append(request)
        self.waiting += len(request.waiting)

    def step(self) -> None:
        """Admit completions when enough slots are free, then decode one token of every sequence."""
        assert self._slots is not None
        slots = self._slots
        if self._is_worth_a_prefill(slots):
            self._admit(self._next(slots), slots)
        slots.compact()
        if slots.running:
            slots.step()

    def admit_first(self, count: int) -> None:
        """Admit those of the first `count` requests of the queue that slots are free for."""
        assert self._slots is not None
        self._admit(self._next(self._slots)[:count], self._slots)

    def preempt(self) -> int:
        """Move the sequences that have not ended to the queue's front; return how many requests.

        The decoder is dropped too: its caches may hold NaN, which would outlast a mask.
        """
        queued = set(map(id, self._queue))
        requests = self._table.preempt()
        self._queue.extendleft(r for r in reversed(requests) if id(r) not in queued)
        self.waiting = sum(len(request.waiting) for request in self._queue)
        self._slots = self._carried = None
        return len(requests)

    def clear(self) -> None:
        self._queue.clear()
        self.waiting = 0
        self._slots = self._carried = None
        self._ended.clear()
        if self._prefixes is not None:
            self._prefixes.clear()

    def take_kept(self, number: int) -> Tensor | None:
        """Take the keys and values that request `number` ended with, but for the last token's."""
        return self._ended.pop(number, None)

    def partials(self) -> list[PartialRequest]:
        waiting = (PartialRequest(r.key, r.prompt_ids, r.waiting) for r in self._queue)
        return [*self._table.partials(), *waiting]

    def _is_worth_a_prefill(self, slots: Slots) -> bool:
        if not self.waiting or (slots.decoder.static_batches and slots.running):
            return False
        return slots.free >= min(self.waiting, slots.count, max(self._params.n, slots.count // 16))

    def _next(self, slots: Slots) -> Admitted:
        """Return the completions at the queue's front that the free slots are enough for."""
        admitted: Admitted = []
        free, prompts = slots.free, slots.decoder.free_prompts(slots.running_slots())
        for request in self._queue:
            split = self._split_requests or free == slots.count
            if not free or len(admitted) == prompts or (len(request.waiting) > free and not split):
                break
            admitted.append((request, request.waiting[:free]))
            free -= len(admitted[-1][1])
        return admitted

    def _admit(self, admitted: Admitted, slots: Slots) -> None:
        """Move completions from the queue to slots; sample the first token of those without any."""
        if not admitted:
            return
        members = [(request, part) for request, parts in admitted for part in parts]
        rows = self._table.add(members)
        self.waiting -= len(rows)
        for request, parts in admitted:
            request.waiting = request.waiting[len(parts) :]
            if not request.waiting:
                self._queue.popleft()
        if self._prefixes is not None:  # n=1: a member is a request
            admitted, rows = self._admit_kept(self._prefixes, admitted, rows, slots)
        if admitted:
            self._admit_whole(admitted, rows, slots)

    def _admit_kept(
        self, prefixes: KeptPrefixes, admitted: Admitted, rows: list[int], slots: Slots
    ) -> tuple[Admitted, list[int]]:
        """Continue from kept prefixes; return the requests without one, and their rows."""
        without_prefix: Admitted = []
        rows_without_prefix, with_prefix = [], list[tuple[int, KeptPrefix, list[int]]]()
        for (request, parts), row in zip(admitted, rows, strict=True):
            prefix = None
            if request.after is not None and not parts[0].token_ids:
                prefix = prefixes.take(request.after, request.prompt_ids)
            if prefix is None:
                without_prefix.append((request, parts))
                rows_without_prefix.append(row)
            else:
                with_prefix.append((row, prefix, request.prompt_ids))
        for low, high in prefill_spans([prompt for _, _, prompt in with_prefix]):
            run = with_prefix[low:high]
            new_slots = slots.allocate(len(run))
            tails = [prompt[len(prefix.ids) :] for _, prefix, prompt in run]
            logits = slots.decoder.resume([prefix.kv for _, prefix, _ in run], tails, new_slots)
            run_rows = torch.tensor([row for row, _, _ in run], device=new_slots.device)
            slots.assign(new_slots, run_rows)
            self._stats.prefill_tokens += sum(map(len, tails))
            slots.sample(logits, new_slots)
        return without_prefix, rows_without_prefix

    def _keep(self, rows: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Keep what ended in `slots` `[k]`, of which `lengths` `[k]` tokens were fed."""
        assert self._slots is not None
        ended = zip(rows.tolist(), slots.tolist(), lengths.tolist(), strict=True)
        for row, slot, length in ended:
            if (kv := self._slots.decoder.keep(slot, length)) is not None:
                self._ended[self._table.owner(row).number] = kv

    def _admit_whole(self, admitted: Admitted, rows: list[int], slots: Slots) -> None:
        """Compute whole prompts, and what resumed completions have."""
        decoder, last_request = slots.decoder, admitted[-1][0]
        plan = plan_prefill(admitted, decoder.shares_prompts)
        new_slots = slots.allocate(len(rows))
        row = torch.tensor(rows, device=new_slots.device)
        for low, high, prefilled in self._prefill(plan, decoder):
            run = slice(bisect_left(plan.which, low), bisect_left(plan.which, high))
            which = torch.tensor(plan.which[run], device=new_slots.device) - low
            decoder.insert(prefilled, which, new_slots[run], slots.running_slots())
            slots.assign(new_slots[run], row[run])
            if prefilled.routed_experts is not None:
                self._table.record_prompt_experts(row[run], prefilled.routed_experts[which])
            self._sample_first(plan, run, which, slots, new_slots[run], prefilled)
            self._carried = None
            split = last_request.waiting and plan.prompts[-1] is last_request.prompt_ids
            if split and high == len(plan.prompts) and not decoder.static_batches:
                self._carried = last_request, prefilled.last()

    def _prefill(self, plan: PrefillPlan, decoder: Decoder) -> Iterator[tuple[int, int, Prefilled]]:
        """Yield runs (low, high, computed) that cover the plan's prompts."""
        start = 0
        if self._carried is not None and plan.prompts[0] is self._carried[0].prompt_ids:
            start = 1
            yield 0, 1, self._carried[1]
        prompts = plan.prompts[start:]
        single_run = [(0, len(prompts))]
        for low, high in single_run if decoder.static_batches else prefill_spans(prompts):
            self._stats.prefill_tokens += sum(map(len, prompts[low:high]))
            yield start + low, start + high, decoder.prefill(prompts[low:high])

    def _sample_first(
        self,
        plan: PrefillPlan,
        run: slice,
        which: Tensor,
        slots: Slots,
        new_slots: Tensor,
        prefilled: Prefilled,
    ) -> None:
        """Sample a token after each inserted prompt, or compute what was sampled before."""
        counts = torch.tensor(plan.sampled[run], device=new_slots.device)
        if any(plan.sampled[run]):
            resumed = counts.nonzero()[:, 0]
            latest = torch.tensor(plan.latest[run], device=new_slots.device)
            slots.resume(new_slots[resumed], counts[resumed], latest[resumed])
            tails = {i: tail for i, tail in enumerate(plan.tails[run]) if tail}
            width = [0] * int(prefilled.lengths.max())
            for low, high in prefill_spans([width + tail for tail in tails.values()]):
                tokens = list(tails.values())[low:high]
                chosen = torch.tensor(list(tails)[low:high], device=new_slots.device)
                slots.decoder.extend(prefilled, which[chosen], tokens, new_slots[chosen])
                self._stats.prefill_tokens += sum(map(len, tokens))
        fresh = (counts == 0).nonzero()[:, 0]
        if len(fresh):
            slots.sample(prefilled.logits[which[fresh]], new_slots[fresh])
