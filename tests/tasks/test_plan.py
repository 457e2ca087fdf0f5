"""The task that checks what can be checked before compute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.context import StageError
from tasks.inputs import RLHFConfig
from tasks.plan import plan
from tasks.profiles import ProfileName


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"path": "/nope"}}, "model.path='/nope' does not exist"),
        ({"model": {"path": "nope"}}, "model.path='nope' does not exist"),
        (
            {"sft": {"skip": True}},
            "sft.skip=true leaves RL without a model: one from scratch needs",
        ),
        ({"data": {"source": "gsm8k", "path": "/nowhere"}}, "'/nowhere' is not a folder"),
        ({"rl": {"reward": {"name": "nice"}}}, "reward.name='nice' is unknown"),
        ({"rl": {"algorithm": {"teacher": "nope"}}}, "rl.algorithm.teacher='nope' does not exist"),
    ],
)
def test_a_wrong_name_is_known_before_torch_is_loaded(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path))
    for module in ("engine.models", "engine.trainers.rl_checks"):
        monkeypatch.setitem(sys.modules, module, None)  # an ImportError where it is reached
    config = RLHFConfig.model_validate(change)
    body: Any = plan.task_function
    with pytest.raises(StageError, match=said):
        body(config, "", "", "", -1, ProfileName.LAPTOP)
