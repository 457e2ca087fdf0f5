"""The main job: data → warm start (or none) → RL → evaluation → promotion.

    pyflyte run workflows/rlhf.py rlhf
    pyflyte run workflows/rlhf.py rlhf --source gsm8k --path /data/gsm8k \
        --config preset:gsm8k_smoke
"""

from tasks import failure  # by module: pyflyte can't list a handler's error input
from workflows import pipelines
from workflows.parts import workflow_of

rlhf = workflow_of(pipelines.rlhf, __name__, failure.rlhf_failed)
