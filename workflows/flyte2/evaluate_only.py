"""Compare two models on Flyte 2, on the held-out problems of a run, without training.

flyte run --local workflows/flyte2/evaluate_only.py evaluate_only
"""

from typing import Any

from workflows import pipelines
from workflows.flyte2 import entry

ONE_GPU: dict[str, Any] = {**entry.FULL, "baseline": entry.FULL["model"], "profile": "one-gpu"}

evaluate_only = entry.task_of(
    pipelines.evaluate_only, __name__, [entry.trigger("evaluate_only", preset="full", **ONE_GPU)]
)
