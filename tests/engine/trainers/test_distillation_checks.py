"""Teachers and losses of distillation that don't go together, and which teacher a row has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from engine.batch import Batch
from engine.config import RLConfig
from engine.dataflows.algo import teacher_weights
from engine.errors import ConfigError, DataError
from engine.trainers.run_plan import check_config

DISTILL: dict[str, Any] = {"loss": "jsd", "top_k": 8}


@pytest.mark.parametrize(
    ("distillation", "changes", "message"),
    [
        ({"loss": "jsd"}, {}, "url=http://t.* top_k=0: a server gives log-probs of the likeliest"),
        (DISTILL, {"rollout": {"temperature": 0.7}}, "log-probs at temperature 1"),
        (DISTILL, {"actor": {"parallel": {"tp": 2}}}, "all logits of a token in one place"),
        (DISTILL, {"actor": {"entropy_coeff": 0.1}}, "entropy_coeff=0.1 .*distillation.loss=jsd"),
        (DISTILL, {"actor": {"clip_ratio": 0.1}}, "clip_ratio=0.1 has no effect with algorithm"),
        (DISTILL | {"loss": "forward_kl", "beta": 0.1}, {}, "beta=0.1 has no effect with loss=for"),
        ({"top_k": 8}, {}, "top_k=8 has no effect with loss=policy_gradient"),
    ],
)
def test_distillation_that_does_not_fit_is_refused(
    distillation: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    served = {"teachers": [{"url": "http://t"}]}
    settings = {
        "algorithm": {"dataflow": "distillation", "distillation": distillation | served},
        "actor": {"use_kl_loss": False} | changes.pop("actor", {}),
    } | changes
    with pytest.raises(ConfigError, match=message):
        check_config(RLConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("distillation", "message"),
    [
        ({"teachers": [{}]}, "has a model .* or a url, and not both"),
        ({"teachers": [{"model": "a", "url": "http://t"}]}, "and not both"),
        ({"teachers": [{"model": "a", "rows": "x"}]}, "which need route_by"),
        ({"teachers": [{"model": "a"}], "route_by": "data_source"}, "give each another value"),
    ],
)
def test_teachers_that_contradict_are_refused(distillation: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RLConfig.model_validate({"algorithm": {"distillation": distillation}})
    several = {"teacher": "a", "distillation": {"teachers": [{"model": "b"}]}}
    with pytest.raises(ValidationError, match="put it among these"):
        RLConfig.model_validate({"algorithm": several})


def test_a_row_without_a_teacher_is_named() -> None:
    teachers = [{"model": "a", "rows": "sums"}, {"model": "b", "rows": "words"}]
    section = {"route_by": "data_source", "teachers": teachers}
    algorithm = RLConfig.model_validate({"algorithm": {"distillation": section}}).algorithm
    ids = {"group_ids": torch.arange(2)}
    rows = Batch(ids, {"data_source": ["words", "sums"]})
    assert teacher_weights(algorithm, rows).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    with pytest.raises(DataError, match="'data_source' is 'code' in a row, and no teacher has"):
        teacher_weights(algorithm, Batch(ids, {"data_source": ["words", "code"]}))
    with pytest.raises(DataError, match="is no column of the data; name one of other"):
        teacher_weights(algorithm, Batch(ids, {"other": ["words", "code"]}))
    weighted = {"teachers": [{"model": "a", "weight": 3}, {"model": "b"}]}
    algorithm = RLConfig.model_validate({"algorithm": {"distillation": weighted}}).algorithm
    assert teacher_weights(algorithm, rows).tolist() == [[0.75, 0.25]] * 2
