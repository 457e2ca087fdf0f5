"""Splits and pads rows for ranks, and merges what ranks return. Values only, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.errors import DataError, WorkerError
from engine.parallel.layout import DataShard
from engine.workers.base import Metric


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """What one rank measured on its rows of a batch."""

    rows: int  # e.g. 32; 0 when the rank had nothing but padding
    values: dict[str, float | Metric]


def shard_rows(
    batch: Batch, share: DataShard, *, unit: int = 1, pad: bool = False
) -> tuple[Batch, int]:
    """Return one rank's consecutive rows of `batch` and how many of them are real.

    Every `unit` rows stay together. Padding comes after the batch's last row: its rows again, with
    `response_mask` 0. Raises DataError for rows that make no whole units.
    """
    rows, parts = len(batch), share.count
    if rows % unit:
        raise DataError(f"{rows} rows make no whole units of {unit}; give a multiple of it")
    if not pad or not rows or rows % (parts * unit) == 0:
        part = batch if parts == 1 else batch.split(parts, unit)[share.index]
        return part, len(part)
    size = -(-rows // (parts * unit)) * unit
    index = torch.arange(share.index * size, (share.index + 1) * size)
    part = batch.rows(index % rows)
    if "response_mask" in batch:
        is_real = (index < rows).to(part["response_mask"].dtype)
        part = part | {"response_mask": part["response_mask"] * is_real[:, None]}
    return part, int((index < rows).sum())


def drop_padding(result: object, rows: int, real: int) -> object:
    """Keep the results of the first `real` of `rows` rows.

    A method may return k rows for each row that it got (a rollout's n completions), in order.
    Raises WorkerError for a result that isn't a batch of k rows each.
    """
    if real == rows or result is None:
        return result
    if not isinstance(result, Batch) or len(result) % rows:
        got = f"{len(result)} rows" if isinstance(result, Batch) else type(result).__name__
        raise WorkerError(
            f"a padded call of {rows} rows returned {got}, in which padding can't be told apart; "
            "return a batch with equally many rows for each, or leave pad=True away"
        )
    return result.rows(slice(0, len(result) // rows * real))


def merge_results(results: Sequence[object]) -> object:
    """Merge what the collecting ranks return: metrics reduced, batches concatenated, one value as
    it is.

    Raises WorkerError for several values of another kind, DataError for batches that don't match.
    """
    metrics = [result for result in results if isinstance(result, RankMetrics)]
    if len(metrics) == len(results):
        return reduce_metrics(metrics)
    if len(results) == 1:
        return results[0]
    batches = [result for result in results if isinstance(result, Batch)]
    if len(batches) == len(results):
        # Ranks that had padding alone are left out: they would only widen the others.
        return Batch.concat([batch for batch in batches if len(batch)] or batches[:1])
    if all(result is None for result in results):
        return None
    raise WorkerError(
        f"results of types {sorted({type(r).__name__ for r in results})} can't be merged over "
        "ranks; return a Batch, or mark the method ONE_TO_ALL, RANK_ZERO or DATA_PARALLEL_METRICS"
    )


def reduce_metrics(ranks: Sequence[RankMetrics]) -> dict[str, float]:
    """Merge the ranks' metrics by name: plain floats by their rows, a Metric as it says.

    A name that only some ranks report is merged over those; ranks without real rows count only
    where all are without.
    """
    ranks = [rank for rank in ranks if rank.rows] or ranks
    names = dict.fromkeys(name for rank in ranks for name in rank.values)
    return {name: _reduce(name, ranks) for name in names}


def _reduce(name: str, ranks: Sequence[RankMetrics]) -> float:
    weighted: list[tuple[Metric, float]] = []
    for rank in ranks:
        if name in rank.values:
            found = rank.values[name]
            metric = found if isinstance(found, Metric) else Metric(float(found))
            weighted.append((metric, rank.rows if metric.weight is None else metric.weight))
    kinds = {metric.reduce for metric, _ in weighted}
    if len(kinds) > 1:
        raise WorkerError(f"metric {name!r} is merged as {sorted(kinds)}; let all ranks agree")
    values = [metric.value for metric, _ in weighted]
    kind = kinds.pop()
    if kind == "sum":
        return sum(values)
    if kind != "mean":
        return max(values) if kind == "max" else min(values)
    if len(weighted) == 1:
        return values[0]  # exact, where value · weight / weight would round
    total = sum(weight for _, weight in weighted)
    if not total:
        return sum(values) / len(values)
    # A value without weight says nothing, not even where it is NaN.
    return sum(metric.value * weight for metric, weight in weighted if weight) / total
