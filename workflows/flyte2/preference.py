"""Preferences on Flyte 2: DPO and its relatives, KTO, reward models, and classic RLHF.

flyte run --local workflows/flyte2/preference.py preference
flyte run --local workflows/flyte2/preference.py classic_rlhf
"""

from workflows import pipelines
from workflows.flyte2 import entry

preference = entry.task_of(pipelines.preference, __name__, [entry.full(pipelines.preference)])
reward_model = entry.task_of(pipelines.reward_model, __name__, [entry.full(pipelines.reward_model)])
classic_rlhf = entry.task_of(
    pipelines.classic_rlhf, __name__, [entry.full(pipelines.classic_rlhf, "classic_rlhf_full")]
)
make_pairs = entry.task_of(pipelines.make_pairs, __name__)
