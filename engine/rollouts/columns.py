"""The columns of a sample: a row is a completion, with one value a token in its lists."""

from __future__ import annotations

import pyarrow as pa

TRAIN, VALIDATION = "train", "validation"
COMPONENT = "reward."  # before the name of a reward's component, in the name of its column

# One number a token of the completion; null where nothing of the run computed it.
TOKEN_VALUES = (
    "advantages",
    "rollout_log_probs",  # the tokens were sampled with
    "old_log_probs",  # by the trainer, before the update
    "ref_log_probs",  # by the frozen reference
    "values",  # the critic's
)

CALL = pa.struct([("name", pa.string()), ("arguments", pa.string())])  # arguments: JSON
TURN = pa.struct(
    [
        ("start", pa.int32()),  # of its sampled tokens among the response's
        ("stop", pa.int32()),  # the last one + 1
        ("reward", pa.float32()),  # the environment's
        ("calls", pa.list_(CALL)),
        ("malformed", pa.list_(pa.string())),  # a sentence for each call that can't be read
    ]
)

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("split", pa.string()),  # TRAIN or VALIDATION
        ("group", pa.int64()),  # completions of one prompt have one number
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float32()),  # as given
        ("shaped_reward", pa.float32()),  # what advantages are made of; null in validation
        ("correct", pa.bool_()),
        ("has_format", pa.bool_()),
        ("truncated", pa.bool_()),
        ("reward_error", pa.string()),  # why the reward failed, or ""
        ("policy_version", pa.int64()),
        ("token_ids", pa.list_(pa.int64())),
        ("tokens", pa.list_(pa.string())),
        *((name, pa.list_(pa.float32())) for name in TOKEN_VALUES),
        ("token_versions", pa.list_(pa.int64())),  # null where all are `policy_version`
        # Of rows of episodes; null for single completions.
        ("trained", pa.list_(pa.bool_())),  # a token counts in the loss
        ("turns", pa.list_(TURN)),  # of this row; an episode may have several rows
        ("first_turn", pa.int64()),
        ("episode_turns", pa.int64()),
        ("episode_reward", pa.float32()),  # the environment's, all turns together
        ("end", pa.string()),  # done, failed, or the limit that was reached
        ("episode_error", pa.string()),
        ("episode_info", pa.string()),  # JSON
        ("environment_seconds", pa.float32()),
    ]
)
"""Beside these, `reward.NAME` (float32) for each component of the reward."""
