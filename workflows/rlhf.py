"""The main job: data → warm start (or none) → RL → evaluation → promotion.

    pyflyte run workflows/rlhf.py rlhf
    pyflyte run workflows/rlhf.py rlhf --source gsm8k --path ../shared/data/gsm8k \
        --config preset:gsm8k_smoke
"""

from typing import Any

from flytekit.types.file import FlyteFile

from tasks import failure  # by module: pyflyte can't list a handler's error input
from workflows.parts import improve_and_promote, pipeline, warm_start_of


@pipeline(failure.rlhf_failed)
def rlhf(p: Any) -> FlyteFile:
    """Warm-start a model (unless `sft.skip`), improve it by RL, and promote it if it is better.

    Returns:
        The run's summary.json.
    """
    dataset, warm_start = warm_start_of(p)
    return improve_and_promote(p, dataset, warm_start)
