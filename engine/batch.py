"""The data plane between roles: rows of completions, and values still being computed.

A `Batch` is a table of tensors and columns with one row a completion, a `Future` the result of a
call on ranks, and a `LazyBatch` a union of both: it waits only when a field is read. A worker group
gets its futures themselves, so rows go from worker to worker and not through the controller.

Prompts are padded on the left to P, responses on the right to R, so the response always starts at
column P of `input_ids`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import DataError, ModelError

Column = Sequence[object] | np.ndarray


@dataclass(frozen=True, slots=True)
class Field:
    """Shape (in terms of B, P prompt columns, R response columns), dtype and meaning."""

    shape: str
    dtype: torch.dtype
    doc: str


FIELDS: dict[str, Field] = {
    "input_ids": Field("B P+R", torch.long, "prompt then response, padded on both outsides"),
    "attention_mask": Field("B P+R", torch.long, "1 on prompt and response tokens"),
    "position_ids": Field("B P+R", torch.long, "0.. from the first real token; 0 on padding"),
    "prompts": Field("B P", torch.long, "prompt tokens, padded on the left"),
    "responses": Field("B R", torch.long, "sampled tokens incl. the end, padded on the right"),
    "response_mask": Field("B R", torch.float32, "1 on tokens the policy sampled"),
    "rollout_log_probs": Field("B R", torch.float32, "log-probs the tokens were sampled with"),
    "old_log_probs": Field("B R", torch.float32, "trainer's log-probs before the update"),
    "ref_log_probs": Field("B R", torch.float32, "frozen reference's log-probs"),
    "ref_response_log_probs": Field("B", torch.float32, "reference's, of the whole response"),
    "ref_kl": Field("B R", torch.float32, "exact KL of the policy from the reference"),
    "sum_pi_squared": Field("B R", torch.float32, "Σ_v π(v)² of each token's distribution"),
    "step_labels": Field("B R", torch.float32, "1 where the step that ends before is right"),
    "teacher_ids": Field("B R K", torch.int32, "teachers' likeliest tokens, one's after another's"),
    "teacher_log_probs": Field("B R K", torch.float32, "theirs; after each, of all other tokens"),
    "teacher_weights": Field("B T", torch.float32, "share of each teacher in a row's loss"),
    "rollout_is_weights": Field("B R", torch.float32, "importance weights; 0 where rejected"),
    "cov_selected": Field("B R", torch.bool, "tokens that clip_cov or kl_cov select"),
    "token_level_scores": Field("B R", torch.float32, "reward as given, on the last token"),
    "token_level_rewards": Field("B R", torch.float32, "scores, shaped, less any KL penalty"),
    "reward_components": Field("B K", torch.float32, "named parts of the score, if it has any"),
    "reward_failed": Field("B", torch.bool, "the reward failed: the row is not learned from"),
    "reward_error": Field("B", torch.bool, "the reward failed, learned from or not"),
    "baseline_rewards": Field("B", torch.float32, "reward of the prompt's greedy completion"),
    "values": Field("B R", torch.float32, "critic's value of the state before each token"),
    "advantages": Field("B R", torch.float32, "advantage of each token, 0 where masked"),
    "returns": Field("B R", torch.float32, "value targets"),
    "group_ids": Field("B", torch.long, "rows with one id are completions of one prompt"),
    "policy_version": Field("B", torch.long, "updates the policy had seen at the oldest token"),
    "token_versions": Field("B R", torch.long, "policy version that drew each token"),
    "routed_experts": Field("B P+R K", torch.int16, "each token's, layer by layer; 0 on padding"),
    "environment_rewards": Field("B R", torch.float32, "of each turn, on its last sampled token"),
    "episode_ids": Field("B", torch.long, "rows with one id go on from each other: one episode"),
    "first_turn": Field("B", torch.long, "number, within the episode, of the row's first turn"),
    "continues": Field("B", torch.bool, "the row's episode goes on in the next row"),
    "episode_failed": Field("B", torch.bool, "it failed, or a limit dropped it: not learned from"),
    "truncated": Field("B", torch.bool, "the completion hit the length limit before its end token"),
}

COLUMNS: dict[str, str] = {
    "prompt_ids": "tokens of the prompt, not yet padded",
    "partial_group": "what rollout has decoded of a group that is continued, or None",
    "completion": "text of the response",
    "episode_end": "how the episode ended: done, turns, tokens, seconds or failed",
    "episode_error": 'why its environment failed, or ""',
    "episode_info": "what its environment said beside the episode",
    "episode_turns": "turns of the policy",
    "episode_turn_spans": "of the turns in a row: where they lie, and their calls",
    "episode_reward": "sum of the environment's rewards",
    "environment_seconds": "that the episode waited for its environment",
    "completions": "argument of reward functions",
    "has_format": "the completion keeps the format, where the reward knows one",
    "reward_correct": "the completion is right",
    "lenient_correct": "a lenient reader finds the right answer, or None",
    "reward_error_cause": 'why the reward failed, or ""',
    "reward_component_names": "names of the parts of the score, the same in each row",
}
"""Columns that roles add to those of the data, whose own must have other names."""

# The fields that a forward pass over completions reads.
TOKENS = ("input_ids", "attention_mask", "responses")


class Batch:
    """B rows of named tensors (`[B, ...]`) and named object columns (length B).

    >>> batch = Batch({"group_ids": torch.tensor([0, 0, 1])}, {"ground_truth": ["4", "4", "9"]})
    >>> len(batch), batch["group_ids"].shape, batch.columns["ground_truth"][2]
    (3, torch.Size([3]), '9')
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], columns: Mapping[str, Column] | None = None
    ) -> None:
        columns = columns or {}
        sizes = {name: len(field) for name, field in {**tensors, **columns}.items()}
        if not sizes:
            raise DataError("a batch needs at least one tensor or column")
        if len(set(sizes.values())) > 1:
            raise DataError(f"rows differ between the fields of a batch: {sizes}")
        self._size = next(iter(sizes.values()))
        self.names = tuple(tensors)  # of the tensors, e.g. ("input_ids", "attention_mask")
        self._tensors = dict(tensors)
        self.columns: dict[str, np.ndarray] = {k: _column(v) for k, v in columns.items()}
        self._widths = self._check()

    def _check(self) -> dict[str, int]:
        """Check known fields against the table; return their widths by axis ("P", "R", "P+R")."""
        widths: dict[str, int] = {}
        for name, field in FIELDS.items():
            if name not in self.names:
                continue
            tensor = self[name]
            if tensor.dim() != len(field.shape.split()) or tensor.dtype != field.dtype:
                raise DataError(
                    f"batch field {name!r} must be {field.dtype} of shape [{field.shape}], "
                    f"got {tensor.dtype} of shape {list(tensor.shape)}"
                )
            if tensor.dim() > 1:
                axis = field.shape.split()[1]
                if widths.setdefault(axis, tensor.shape[1]) != tensor.shape[1]:
                    raise DataError(
                        f"batch field {name!r} has {tensor.shape[1]} columns where the batch's "
                        f"{axis} is {widths[axis]}"
                    )
        if widths.keys() >= {"P", "R", "P+R"} and widths["P"] + widths["R"] != widths["P+R"]:
            raise DataError(f"prompt and response widths don't add up: {widths}")
        return widths

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: str) -> bool:
        return name in self.names or name in self.columns

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            names = ", ".join(sorted(self.names)) or "none"
            raise DataError(f"batch has no tensor {name!r}; it has {names}")
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """Return the tensor `name`, or None where the batch has none."""
        return self[name] if name in self.names else None

    def as_dict(self) -> dict[str, Tensor]:
        """Return the tensors by name; they share their memory with the batch."""
        return dict(self._tensors)

    def __or__(self, other: Batch | Mapping[str, Tensor]) -> Batch:
        """Return the union of the fields of both; those of `other` win."""
        if not isinstance(other, Batch):
            if not other:
                return self
            other = Batch(other)
        if len(other) != len(self):
            raise DataError(f"can't unite batches of {len(self)} and {len(other)} rows")
        return Batch(self.as_dict() | other.as_dict(), {**self.columns, **other.columns})

    def select(self, names: Iterable[str]) -> Batch:
        """Return a batch of just these tensors and columns, all of which must be there."""
        names = list(names)
        tensors = {n: self[n] for n in names if n not in self.columns}
        return Batch(tensors, {n: self.columns[n] for n in names if n in self.columns})

    def rows(self, index: Tensor | Sequence[int] | slice) -> Batch:
        """Return the rows at `index` (integer indices, a boolean mask `[B]`, or a slice)."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index) if len(index) else torch.empty(0, dtype=torch.long)
        where = index if isinstance(index, slice) else index.numpy()
        tensors = {name: self[name][index] for name in self.names}
        return Batch(tensors, {k: v[where] for k, v in self.columns.items()})

    def split(self, parts: int, unit: int = 1) -> list[Batch]:
        """Split into `parts` runs of rows whose lengths differ by one unit of `unit` rows at most.

        Raises DataError when there are fewer units than parts.
        """
        units = len(self) // unit
        if not 1 <= parts <= units:
            together = f" in units of {unit}" if unit > 1 else ""
            raise DataError(
                f"can't split {len(self)} rows{together} into {parts} parts; use more rows or "
                "fewer ranks"
            )
        edges = [unit * round(i * units / parts) for i in range(parts + 1)]
        return [self.rows(slice(a, b)) for a, b in pairwise(edges)]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Stack batches that have the same fields, in order; DataError when fields differ.

        Where P or R differ, the narrower ones get more zeros, which their masks leave out. Where no
        row of a batch could be scored, its rows get reward components of 0.
        """
        if not batches:
            raise DataError("nothing to concatenate")
        batches = _with_components(batches)
        first = batches[0]
        for other in batches[1:]:
            if differing := {*first.names, *first.columns} ^ {*other.names, *other.columns}:
                raise DataError(f"can't stack batches: only one of them has {sorted(differing)}")
        widths = [batch._prompt_and_response() for batch in batches]
        widest = max(p for p, _ in widths), max(r for _, r in widths)
        padding = [(widest[0] - p, widest[1] - r) for p, r in widths]
        tensors = {}
        for name in first.names:
            parts = [_pad_columns(name, b[name], *n) for b, n in zip(batches, padding, strict=True)]
            if len(shapes := {part.shape[1:] for part in parts}) > 1:
                raise DataError(f"can't stack {name!r}: its rows have shapes {list(shapes)}")
            tensors[name] = torch.cat(parts)
        columns = {k: np.concatenate([b.columns[k] for b in batches]) for k in first.columns}
        return Batch(tensors, columns)

    def _prompt_and_response(self) -> tuple[int, int]:
        """Return P and R, 0 where no field has them."""
        p, r, both = (self._widths.get(axis, 0) for axis in ("P", "R", "P+R"))
        return max(p, both - r) if r else p, max(r, both - p) if p else r

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[object, ...]]:
        """Pickle as NumPy arrays, which readers map from Ray's shared memory and can't write to."""
        packed = {name: _pack(tensor) for name, tensor in self.as_dict().items()}
        return _unpickle, (packed, self.columns)

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}{list(v.shape)}" for k, v in self.as_dict().items())
        return f"Batch({len(self)} rows: {fields}; columns {sorted(self.columns)})"


def _pack(tensor: Tensor) -> Tensor | tuple[np.ndarray, torch.dtype]:
    """Return a CPU tensor as array and dtype (NumPy lacks bfloat16); others as they are."""
    if tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor
    array = tensor.contiguous()
    array = array.view(torch.int16) if array.dtype == torch.bfloat16 else array
    return array.numpy(), tensor.dtype


def _unpickle(
    packed: dict[str, Tensor | tuple[np.ndarray, torch.dtype]], columns: dict[str, np.ndarray]
) -> Batch:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensors = {
            name: item if isinstance(item, Tensor) else torch.from_numpy(item[0]).view(item[1])
            for name, item in packed.items()
        }
    return Batch(tensors, columns)


def _pad_columns(name: str, tensor: Tensor, prompt: int, response: int) -> Tensor:
    """Pad a field that has P by `prompt` columns on the left, one that has R on the right."""
    shape = FIELDS[name].shape.split() if name in FIELDS else []
    axis = shape[1] if len(shape) > 1 else ""
    left, right = prompt if "P" in axis else 0, response if "R" in axis else 0
    inner = (0, 0) * (len(shape) - 2)
    return F.pad(tensor, (*inner, left, right)) if left or right else tensor


def _with_components(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Give batches whose rewards all failed the components that others have; they are 0 there."""
    known = next((b for b in batches if "reward_components" in b and len(b)), None)
    if known is None:
        return batches
    width, names = known["reward_components"].shape[1], known.columns["reward_component_names"]

    def filled(batch: Batch) -> Batch:
        all_failed = "reward_error" in batch and bool(batch["reward_error"].all())
        if "reward_components" in batch or not all_failed:
            return batch
        zeros = {"reward_components": torch.zeros(len(batch), width)}
        return batch | Batch(zeros, {"reward_component_names": [names[0]] * len(batch)})

    return list(map(filled, batches))


def _column(values: Column) -> np.ndarray:
    """Return `values` as a 1-d object array, without NumPy looking into nested lists."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    return np.fromiter(values, dtype=object, count=len(values))


R_co = TypeVar("R_co", covariant=True)


class Future(ABC, Generic[R_co]):
    """A value that is being computed, or is there."""

    number = 0  # of the call that computes it, from 1; 0: no call of a group
    fields: frozenset[str] = frozenset()  # of the batch that it results in; empty: unknown

    @abstractmethod
    def result(self, until: float | None = None) -> R_co:
        """Wait until the group's deadline, or `until` (monotonic), or raise WorkerError."""

    @abstractmethod
    def done(self) -> bool:
        """Say whether `result` would return, or raise, without waiting for work."""

    @abstractmethod
    def failure(self) -> BaseException | None:
        """Return the error of a call that has failed already, without waiting."""


class Ready(Future[R_co]):
    """A future whose value is there already."""

    def __init__(self, value: R_co) -> None:
        self._value = value

    def result(self, until: float | None = None) -> R_co:
        return self._value

    def done(self) -> bool:
        return True

    def failure(self) -> None:
        return None


class ConcatFuture(Future[Batch]):
    """The rows of several futures, one after the other, as one future."""

    def __init__(self, parts: Sequence[Future[Batch]]) -> None:
        self.parts = tuple(parts)
        self.fields = self.parts[0].fields

    def result(self, until: float | None = None) -> Batch:
        return Batch.concat([part.result(until) for part in self.parts])

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def failure(self) -> BaseException | None:
        return next(filter(None, (part.failure() for part in self.parts)), None)


class LazyBatch:
    """The union of batches, some of them still being computed.

    >>> batch = LazyBatch(prompts)
    >>> batch |= roles.reference.log_probs(batch)   # returns at once
    >>> batch["ref_log_probs"]                      # waits
    """

    def __init__(self, *pieces: Batch | Future[Batch]) -> None:
        self.pieces = list(pieces)
        self._united: Batch | None = None

    def __or__(self, other: BatchLike | dict[str, Tensor]) -> LazyBatch:
        if isinstance(other, LazyBatch):
            return LazyBatch(*self.pieces, *other.pieces)
        return LazyBatch(*self.pieces, Batch(other) if isinstance(other, dict) else other)

    def resolve(self) -> Batch:
        """Wait for all pieces and return them as one batch (later pieces win)."""
        if self._united is None:  # the pieces stay where they are, for groups that get them later
            batches = (p if isinstance(p, Batch) else p.result() for p in self.pieces)
            self._united = reduce(or_, batches)
        return self._united

    def __getitem__(self, name: str) -> Tensor:
        return self.resolve()[name]

    def __len__(self) -> int:
        return len(self.resolve())


BatchLike = Batch | LazyBatch | Future[Batch]  # what a group takes where its workers get a Batch


def check_token_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """Raise ModelError if one of `ids`, those of `name`, is not in the model's vocabulary."""
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocabulary:
        raise ModelError(
            f"{name} has token id {low if low < 0 else high} outside the model's vocabulary of "
            f"{vocabulary}; use the tokenizer the model was trained with"
        )
