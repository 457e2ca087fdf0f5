"""The main job on Flyte 2: data → warm start (or none) → RL → evaluation → promotion.

    flyte run --local workflows/flyte2/rlhf.py rlhf
    flyte run --local workflows/flyte2/rlhf.py rlhf --source gsm8k --path /data/gsm8k \
        --config preset:gsm8k_smoke
"""

from typing import Any

from workflows import pipelines
from workflows.flyte2 import entry

SMOKE: dict[str, Any] = {"source": "arithmetic", "profile": "laptop", "seed": 0}

rlhf = entry.task_of(
    pipelines.rlhf,
    __name__,
    [entry.trigger("rlhf_smoke", preset="smoke", **SMOKE), entry.full(pipelines.rlhf)],
)
