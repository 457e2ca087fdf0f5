"""Preferences: DPO and its relatives, KTO, reward models, and classic RLHF, each with one command.

    pyflyte run workflows/preference.py preference
    pyflyte run workflows/preference.py preference --model /models/Qwen2.5-0.5B-Instruct \
        --preferences pairs.jsonl --config '{"sft": {"skip": true}}'
    pyflyte run workflows/preference.py reward_model
    pyflyte run workflows/preference.py classic_rlhf
    pyflyte run workflows/preference.py make_pairs --policy models:/hybridflyte-policy@champion
"""

from tasks import failure  # by module: pyflyte can't list a handler's error input
from workflows import pipelines
from workflows.parts import workflow_of

preference = workflow_of(pipelines.preference, __name__, failure.preference_failed)
reward_model = workflow_of(pipelines.reward_model, __name__, failure.reward_model_failed)
classic_rlhf = workflow_of(pipelines.classic_rlhf, __name__, failure.classic_rlhf_failed)
make_pairs = workflow_of(pipelines.make_pairs, __name__, failure.make_pairs_failed)
