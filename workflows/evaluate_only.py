"""Compare two models on the held-out problems of a run, without training.

    pyflyte run workflows/evaluate_only.py evaluate_only \
        --candidate models:/hybridflyte-policy@champion --baseline /models/Qwen2.5-0.5B

With the settings of a run its data come from the cache, so that the problems are the same.
"""

from tasks import failure  # by module: pyflyte can't list a handler's error input
from workflows import pipelines
from workflows.parts import workflow_of

evaluate_only = workflow_of(pipelines.evaluate_only, __name__, failure.evaluate_only_failed)
