"""Metrics of one RL step, from the batch that it learned from."""

from __future__ import annotations

import torch

from engine.algorithms.masked import Groups
from engine.batch import Batch


def step_metrics(batch: Batch, seconds: float) -> dict[str, float]:
    """Reward, lengths, truncation, group signal and throughput of a step.

    Means of rewards leave out the rows whose reward failed.
    """
    width = batch["responses"].shape[1]
    lengths = batch["attention_mask"][:, -width:].sum(1).float()
    tokens = float(batch["attention_mask"].sum())
    failed, whole = batch["reward_error"], whole_rows(batch)
    scored = whole & ~failed
    scores = completion_scores(batch)[scored]
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(correction=0)),
        "reward/errors": float(failed[whole].float().mean()),
        "reward/groups_with_signal": _groups_with_signal(scores, batch["group_ids"][scored]),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(batch["truncated"].float().mean()),
        "perf/step_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
    }
    if "has_format" in batch:
        metrics["reward/format_rate"] = float(batch.columns["has_format"].astype(float).mean())
    return metrics | reward_metrics(batch, "reward") | episode_metrics(batch, "episode")


def validation_metrics(batch: Batch) -> dict[str, float]:
    """`validation/reward`, the mean of all completions; of several a prompt also `reward_best`, the
    mean over prompts of the best one. `reward_metrics` and `episode_metrics` below `validation/`.
    """
    whole = whole_rows(batch)
    scores, groups = completion_scores(batch)[whole], batch["group_ids"][whole]
    metrics = {"validation/reward": float(scores.mean())}
    members = torch.unique(groups, return_inverse=True)[1]
    if (count := int(members.max()) + 1) < len(scores):
        best = torch.full((count,), -torch.inf).scatter_reduce(0, members, scores.float(), "amax")
        metrics["validation/reward_best"] = float(best.mean())
    metrics |= reward_metrics(batch, "validation")
    return metrics | episode_metrics(batch, "validation/episode")


def completion_scores(batch: Batch) -> torch.Tensor:
    """Each row's score `[B]`; that of the whole episode, where it has several rows."""
    own = batch["token_level_scores"].sum(1)
    if "episode_ids" not in batch:
        return own
    episode = torch.unique(batch["episode_ids"], return_inverse=True)[1]
    return torch.zeros_like(own).index_add(0, episode, own)[episode]


def whole_rows(batch: Batch) -> torch.Tensor:
    """One row of each completion, bool `[B]`: the last, where an episode has several."""
    if "continues" in batch:
        return ~batch["continues"]
    return torch.ones(len(batch), dtype=torch.bool)


def episode_metrics(batch: Batch, prefix: str) -> dict[str, float]:
    """Turns, tokens, ends and what environments said, of a batch of episodes; else nothing.

    Numbers and booleans of `info` that all finished episodes have are averaged.
    """
    if "episode_turns" not in batch:
        return {}
    rows = whole_rows(batch)
    columns = {name: values[rows.numpy()] for name, values in batch.columns.items()}
    turns, ends = columns["episode_turns"].astype(float), columns["episode_end"]
    width = batch["responses"].shape[1]
    response, sampled = batch["attention_mask"][:, -width:].sum(), batch["response_mask"].sum()
    metrics = {
        f"{prefix}/turns_mean": float(turns.mean()),
        f"{prefix}/turns_max": float(turns.max()),
        f"{prefix}/observed_tokens": float(response - sampled) / len(turns),
        f"{prefix}/environment_s": float(columns["environment_seconds"].astype(float).mean()),
    }
    for end in ("done", "turns", "tokens", "seconds", "turn_seconds", "failed"):
        metrics[f"{prefix}/end_{end}"] = float((ends == end).mean())
    metrics[f"{prefix}/dropped"] = float(batch["episode_failed"][rows].float().mean())
    infos = [info for info, end in zip(columns["episode_info"], ends, strict=True) if end == "done"]
    for name in sorted(set.intersection(*map(set, infos)) if infos else ()):
        values = [info[name] for info in infos]
        if all(isinstance(value, bool | int | float) for value in values):
            metrics[f"{prefix}/{name}"] = sum(map(float, values)) / len(values)
    return metrics


def reward_metrics(batch: Batch, prefix: str) -> dict[str, float]:
    """Share of right completions and means of the components, of all and by source.

    A batch of one source has no metrics by source. Rows whose reward failed count as wrong, and
    are left out of means.
    """
    whole = whole_rows(batch)
    scored = whole & ~batch["reward_error"]
    right = torch.tensor(batch.columns["reward_correct"].astype(float))
    means = dict(_reward_components(batch))
    metrics = {f"{prefix}/correct": float(right[whole].mean())}
    metrics |= {f"{prefix}/{name}": float(column[scored].mean()) for name, column in means.items()}
    means = {"mean": completion_scores(batch)} | means
    sources = [str(one) for one in batch.columns.get("data_source", ())]
    names = sorted(set(sources))
    for source in names if len(names) > 1 else ():
        rows = whole & torch.tensor([one == source for one in sources])
        metrics[f"{prefix}/{source}/correct"] = float(right[rows].mean())
        if (rows & scored).any():
            for name, column in means.items():
                metrics[f"{prefix}/{source}/{name}"] = float(column[rows & scored].mean())
    return metrics


def staleness_metrics(batch: Batch, version: int) -> dict[str, float]:
    """How many updates behind the trainer's `version` the completions were started."""
    behind = (version - batch["policy_version"]).float()
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


def _reward_components(batch: Batch) -> list[tuple[str, torch.Tensor]]:
    """The reward's components `[B]` by name, if it has any."""
    if "reward_components" not in batch:
        return []
    names = batch.columns["reward_component_names"][0]
    return list(zip(names, batch["reward_components"].unbind(1), strict=True))


def _groups_with_signal(scores: torch.Tensor, group_ids: torch.Tensor) -> float:
    """Share of groups whose completions don't all have the same score."""
    every = torch.ones_like(group_ids, dtype=torch.bool)
    groups = Groups.of(group_ids, every)
    return float((groups.range(scores) > 0).float().mean())
