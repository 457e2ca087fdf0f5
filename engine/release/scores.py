"""A model's scores in its card: as results of the front matter, and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.console import points
from engine.evaluation.metrics import Interval
from engine.evaluation.summary import EvaluationComparison, ModelSummary
from engine.release.markdown import table
from engine.release.model import ReleasedModel

if TYPE_CHECKING:
    from huggingface_hub import EvalResult


def results(model: ReleasedModel, source: str) -> list[EvalResult]:
    """One result a metric, with the ends of its interval as the metric's arguments."""
    from huggingface_hub import EvalResult

    found, evaluation = model.comparison, model.evaluation
    if found is None or evaluation is None:
        return []
    dataset = {parent.name: parent.digest for parent in evaluation.parents}.get("dataset", "")
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=source,
            dataset_name=f"{source}, held-out problems",
            dataset_split="test",
            dataset_args={"problems": found.problems, "digest": dataset},
            metric_type=kind,
            metric_name=name,
            metric_value=round(value.mean, 6),
            metric_args={
                "confidence": found.confidence,
                "low": round(value.low, 6),
                "high": round(value.high, 6),
            },
        )
        for kind, name, value in _rates(found, found.after)
    ] + _harness_results(model)


def _harness_results(model: ReleasedModel) -> list[EvalResult]:
    """One result a metric of the lm-evaluation-harness."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=one.task,
            dataset_name=f"{one.task} (lm-evaluation-harness)",
            dataset_args={"version": one.version, "documents": one.documents},
            metric_type=one.metric,
            metric_name=one.metric,
            metric_value=round(one.value, 6),
            metric_args={"stderr": one.stderr} if one.stderr is not None else None,
        )
        for one in model.harness
    ]


def _rates(found: EvaluationComparison, side: ModelSummary) -> list[tuple[str, str, Interval]]:
    """Type, name and value of each rate."""
    return [
        ("pass@1", "pass@1 (greedy)", side.pass_at_1),
        (f"pass@{found.k}", f"pass@{found.k} (of {found.samples} samples)", side.pass_at_k),
        ("majority", f"majority vote of {found.samples}", side.majority),
        ("format", "answers in the format", side.format_rate),
    ]


def score_sections(model: ReleasedModel) -> list[str]:
    found, evaluation = model.comparison, model.evaluation
    if found is None or evaluation is None:
        return ["## Scores\n\nThis model was not evaluated."]
    kinds = {parent.name: parent.kind for parent in evaluation.parents}
    start = "start_model" if kinds.get("warm_start") == "start_model" else found.before.model
    head = ("", start.replace("_", " "), "this model")
    rows: list[tuple[str, ...]] = [
        (name, _percent(before), _percent(after))
        for (_, name, before), (_, _, after) in zip(
            _rates(found, found.before), _rates(found, found.after), strict=True
        )
    ]
    lengths = [f"{side.response_length.mean:.1f}" for side in (found.before, found.after)]
    rows.append(("mean response, tokens", *lengths))
    return [
        f"## Scores\n\n{found.problems} held-out problems, the same for both models, with "
        f"{found.confidence:.0%} intervals; evaluation `{evaluation.digest}`, seed {found.seed}.",
        table(head, rows),
        f"Paired gain in greedy pass@1: {points(found.gain.mean, found.gain.low, found.gain.high)}"
        f"; {found.fixed} problems became right and {found.broken} wrong.",
        *_harness_table(model),
    ]


def _harness_table(model: ReleasedModel) -> list[str]:
    if model.comparison is None or not model.harness:
        return []
    rows = []
    for one in model.harness:
        ends = one.interval(model.comparison.confidence)
        shown = f"{one.value:.4g}" + (f" [{ends.low:.4g}, {ends.high:.4g}]" if ends else "")
        rows.append((one.task, one.version, one.metric, shown))
    return [
        "lm-evaluation-harness, intervals by its standard errors:",
        table(("task", "version", "metric", "this model"), rows),
    ]


def _percent(value: Interval) -> str:
    return f"{value.mean:.1%} [{value.low:.1%}, {value.high:.1%}]"
