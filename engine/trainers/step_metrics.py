"""Metrics of the batch that an RL step learned from, or that a validation decoded."""

from collections.abc import Mapping

import torch

from engine.algorithms.masked import Groups
from engine.batch import Batch

_ENDS = ("done", "turns", "tokens", "seconds", "turn_seconds", "failed")


def step_metrics(batch: Batch, seconds: float) -> dict[str, float]:
    """Reward (without failed ones), lengths, truncation, group signal and throughput of a step."""
    width = batch["responses"].shape[1]
    lengths = batch["attention_mask"][:, -width:].sum(1).float()
    failed, last_rows = batch["reward_error"], _last_rows(batch)
    scored = last_rows & ~failed
    scores, group_ids = _completion_scores(batch)[scored], batch["group_ids"][scored]
    groups = Groups.of(group_ids, torch.ones_like(group_ids, dtype=torch.bool))
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(correction=0)),
        "reward/errors": float(failed[last_rows].float().mean()),
        "reward/groups_with_signal": float((groups.range(scores) > 0).float().mean()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(batch["truncated"].float().mean()),
        "response/repeated_ngrams": _repeated_ngrams(batch["responses"], lengths.long()),
        "perf/step_s": seconds,
        "perf/tokens_per_s": float(batch["attention_mask"].sum()) / seconds,
    }
    if "has_format" in batch:
        metrics["reward/format_rate"] = float(batch.columns["has_format"].astype(float).mean())
    metrics |= _reward_metrics(batch, "reward") | _second_grader(batch, lengths)
    return metrics | _episode_metrics(batch, "episode")


def _repeated_ngrams(tokens: torch.Tensor, lengths: torch.Tensor, size: int = 4) -> float:
    """The mean share of runs of `size` tokens that their row `[R]` has had before."""
    count = tokens.shape[1] - size + 1
    if count < 2:
        return 0.0
    keys = torch.zeros(len(tokens), count, dtype=torch.long)
    for offset in range(size):  # a hash that wraps around
        keys = keys * 6364136223846793005 + tokens[:, offset : offset + count] + 1
    runs = (lengths - size + 1).clamp(min=0)
    unused = torch.arange(count) >= runs[:, None]
    keys = torch.where(unused, torch.arange(count) - 2**62, keys).sort(1).values
    repeated = (keys[:, 1:] == keys[:, :-1]).sum(1)
    return float((repeated / runs.clamp(min=1)).mean())


def _second_grader(batch: Batch, lengths: torch.Tensor) -> dict[str, float]:
    """What a lenient reader calls right, it alone, and how accuracy changes with a token more."""
    rows = _last_rows(batch)
    right = torch.tensor(batch.columns["reward_correct"].astype(float))[rows]
    spread = lengths[rows].double() - lengths[rows].double().mean()
    variance = float((spread**2).sum())
    metrics = {"reward/length_slope": float((spread * right).sum()) / variance if variance else 0.0}
    verdicts = [v for v, row in zip(batch.columns["lenient_correct"], rows, strict=True) if row]
    pairs = [
        (bool(v), r > 0) for v, r in zip(verdicts, right.tolist(), strict=True) if v is not None
    ]
    if pairs:
        metrics["reward/second_grader"] = sum(v for v, _ in pairs) / len(pairs)
        metrics["reward/only_lenient"] = sum(v and not r for v, r in pairs) / len(pairs)
    return metrics


def validation_metrics(batch: Batch) -> dict[str, float]:
    """`validation/reward`, the mean of all completions, and rewards and episodes by part.

    Of several completions a prompt also `reward_best`, the mean over prompts of the best one.
    """
    last_rows = _last_rows(batch)
    scores, groups = _completion_scores(batch)[last_rows], batch["group_ids"][last_rows]
    metrics = {"validation/reward": float(scores.mean())}
    members = torch.unique(groups, return_inverse=True)[1]
    if (count := int(members.max()) + 1) < len(scores):
        best = torch.full((count,), -torch.inf).scatter_reduce(0, members, scores.float(), "amax")
        metrics["validation/reward_best"] = float(best.mean())
    metrics |= _reward_metrics(batch, "validation")
    return metrics | _episode_metrics(batch, "validation/episode")


def staleness_metrics(batch: Batch, version: int) -> dict[str, float]:
    """How many updates behind the trainer's `version` the completions were started."""
    behind = (version - batch["policy_version"]).float()
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


def _completion_scores(batch: Batch) -> torch.Tensor:
    """Each row's score `[B]`; that of the whole episode, where it has several rows."""
    scores = batch["token_level_scores"].sum(1)
    if "episode_ids" not in batch:
        return scores
    episode = torch.unique(batch["episode_ids"], return_inverse=True)[1]
    return torch.zeros_like(scores).index_add(0, episode, scores)[episode]


def _last_rows(batch: Batch) -> torch.Tensor:
    """One row of each completion, bool `[B]`: the last, where an episode has several."""
    if "continues" in batch:
        return ~batch["continues"]
    return torch.ones(len(batch), dtype=torch.bool)


def _episode_metrics(batch: Batch, prefix: str) -> dict[str, float]:
    """Turns, tokens, ends and shared numbers of `info`, of a batch of episodes; else nothing."""
    if "episode_turns" not in batch:
        return {}
    rows = _last_rows(batch)
    columns = {name: values[rows.numpy()] for name, values in batch.columns.items()}
    turns, ends = columns["episode_turns"].astype(float), columns["episode_end"]
    width = batch["responses"].shape[1]
    response, sampled = batch["attention_mask"][:, -width:].sum(), batch["response_mask"].sum()
    metrics = {
        f"{prefix}/turns_mean": float(turns.mean()),
        f"{prefix}/turns_max": float(turns.max()),
        f"{prefix}/observed_tokens": float(response - sampled) / len(turns),
        f"{prefix}/environment_s": float(columns["environment_seconds"].astype(float).mean()),
        f"{prefix}/dropped": float(batch["episode_failed"][rows].float().mean()),
    }
    metrics |= {f"{prefix}/end_{end}": float((ends == end).mean()) for end in _ENDS}
    infos = [info for info, end in zip(columns["episode_info"], ends, strict=True) if end == "done"]
    for name in sorted(set.intersection(*map(set, infos)) if infos else ()):
        values = [info[name] for info in infos]
        if all(isinstance(value, bool | int | float) for value in values):
            metrics[f"{prefix}/{name}"] = sum(map(float, values)) / len(values)
    return metrics


def _reward_metrics(batch: Batch, prefix: str) -> dict[str, float]:
    """Share of right completions and means of the components; of several sources also by source."""
    last_rows = _last_rows(batch)
    scored = last_rows & ~batch["reward_error"]  # where it failed, the completion counts as wrong
    right = torch.tensor(batch.columns["reward_correct"].astype(float))
    means: dict[str, torch.Tensor] = {}
    if "reward_components" in batch:
        names = batch.columns["reward_component_names"][0]
        means = dict(zip(names, batch["reward_components"].unbind(1), strict=True))
    metrics = {f"{prefix}/correct": float(right[last_rows].mean())}
    metrics |= _means(means, scored, prefix)
    means = {"mean": _completion_scores(batch)} | means
    sources = [str(source) for source in batch.columns.get("data_source", ())]
    names = sorted(set(sources))
    for source in names if len(names) > 1 else ():
        rows = last_rows & torch.tensor([other == source for other in sources])
        metrics[f"{prefix}/{source}/correct"] = float(right[rows].mean())
        metrics |= _means(means, rows & scored, f"{prefix}/{source}")
    return metrics


def _means(
    columns: Mapping[str, torch.Tensor], rows: torch.Tensor, prefix: str
) -> dict[str, float]:
    """The mean of each column over the rows to which it applies; nothing where there are none."""
    used = {name: rows & ~column.isnan() for name, column in columns.items()}
    return {
        f"{prefix}/{name}": float(column[used[name]].mean())
        for name, column in columns.items()
        if used[name].any()
    }
