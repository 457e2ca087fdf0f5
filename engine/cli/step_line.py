"""The lines that are printed after a step of reinforcement learning, and after a validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.batch import Batch
from engine.console import human_time
from engine.redaction import presentable

_LONGEST = 200  # characters of a text that are printed

# What the line shows of what the algorithm at hand measures, and how.
_FACTS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("KL", "actor/kl", "{:.4f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("accuracy", "actor/rewards/accuracies", "{:.3f}"),
    ("length", "response/length_mean", "{:.1f}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
)


def printed_completions(batch: Batch, count: int) -> list[str]:
    """The first `count` completions of a validation with their prompts' ends and scores."""
    scores: list[float] = batch["token_level_scores"].sum(1).tolist()
    columns = batch.columns
    rows = zip(columns["prompt"], columns["completion"], scores, strict=True)
    return [
        presentable(
            f"rl: validation {score:.3f} | {_brief(prompt[-1]['content'])} | {_brief(text)}"
        )
        for prompt, text, score in list(rows)[:count]
    ]


def _brief(text: object) -> str:
    """The end of a text, in one line."""
    words = " ".join(str(text).split())
    return words if len(words) <= _LONGEST else f"…{words[-_LONGEST:]}"


def step_line(
    step: int,
    total: int,
    metrics: Mapping[str, float],
    history: Sequence[Mapping[str, float]],
) -> str:
    """Say how step `step` (1-based) went and, from the steps in `history`, how long is left."""
    seconds = sum(row["perf/step_s"] for row in history) / max(1, len(history))
    facts = {name: shown.format(metrics[key]) for name, key, shown in _FACTS if key in metrics}
    parts = [f"rl {step:>4}/{total}", *(f"{name} {shown}" for name, shown in facts.items())]
    parts += [
        f"{metrics['perf/tokens_per_s']:,.0f} tok/s",
        f"{metrics['perf/step_s']:.1f} s",
        f"{human_time(seconds * (total - step))} left",
    ]
    if "validation/reward" in metrics:
        parts.append(f"validation {metrics['validation/reward']:.3f}")
    return " · ".join(parts)
