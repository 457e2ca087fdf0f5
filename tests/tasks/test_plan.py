"""The task that checks what can be checked before compute."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from flytekit.core.local_cache import LocalTaskCache

from engine.errors import ConfigError
from engine.stages.plan import check_settings, checks_key
from engine.stages.profiles import check_model_layouts, require_shared_home
from tasks.host import StageError, flyte_host
from tasks.inputs import RLHFConfig
from tasks.stages import plan


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
    for module in ("engine.models", "engine.trainers.run_plan"):
        monkeypatch.setitem(sys.modules, module, None)  # an ImportError where it is reached
    config = RLHFConfig.model_validate(change)
    body: Any = plan.task_function
    with pytest.raises(StageError, match=said):
        body(config, "", "", "", -1, "laptop")


def test_a_logger_without_its_package_is_known_before_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "engine.trainers.run_plan", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "wandb" else find(name)
    )
    config = RLHFConfig.model_validate({"tracking": {"logger": ["console", "wandb"]}})
    with pytest.raises(ConfigError, match=r"^tracking\.logger: wandb needs the package wandb"):
        check_settings(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sft": {"parallel": {"fsdp": 2}, "placement": "local"}}, "sft.placement=local runs one"),
        ({"sft": {"pools": [{"roles": ["actor"]}]}}, "there is one pool here, of roles"),
        ({"evaluate": {"parallel": {"pp": 2}}}, "evaluate.parallel.pp=2 has no effect"),
    ],
)
def test_layouts_are_checked_before_anything_starts(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(RLHFConfig.model_validate(change))


@pytest.mark.parametrize("section", ["sft", "rl.actor", "evaluate"])
def test_so_is_whether_the_model_can_be_split(tmp_path: Path, section: str) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    change: dict[str, Any] = {"parallel": {"tp": 3}}
    for name in reversed(section.split(".")):
        change = {name: change}
    config = RLHFConfig.model_validate({"model": {"path": str(tmp_path)}, **change})
    with pytest.raises(ConfigError, match="tp=3 does not divide the model's num_attention_heads=4"):
        check_model_layouts(config)
    check_model_layouts(RLHFConfig.model_validate({"model": {"path": str(tmp_path)}}))


def test_a_home_that_other_pods_don_t_see(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RLHFConfig()
    monkeypatch.setenv("HYBRIDFLYTE_HOME", "/outputs/of/a/pod")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    require_shared_home(config)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(
        ConfigError, match=r"HYBRIDFLYTE_HOME=/outputs/of/a/pod is on the pod's own"
    ):
        require_shared_home(config)
    local = {"rl": {"trainer": {"placement": "local"}}}
    require_shared_home(RLHFConfig.model_validate(local))
    monkeypatch.setenv("HYBRIDFLYTE_HOME", "/dev/shm/outputs")  # of another file system
    require_shared_home(config)


def check_on_flyte(config: RLHFConfig) -> None:
    """Check settings where Flyte's local cache remembers what has passed."""
    with flyte_host():
        check_settings(config)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local cache of Flyte of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(LocalTaskCache, "_initialized", False)
    monkeypatch.setattr(LocalTaskCache, "_cache", None, raising=False)


@pytest.mark.usefixtures("empty_cache")
def test_settings_that_passed_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RLHFConfig()
    check_on_flyte(config)
    monkeypatch.setitem(sys.modules, "engine.trainers.run_plan", None)  # no further check
    check_on_flyte(config)
    with pytest.raises(ImportError):
        check_on_flyte(config.model_copy(update={"seed": 7}))
    monkeypatch.setattr("engine.stages.plan.sources_digest", lambda: "edited")
    with pytest.raises(ImportError):
        check_on_flyte(config)


@pytest.mark.usefixtures("empty_cache")
def test_settings_that_fail_are_checked_again() -> None:
    config = RLHFConfig.model_validate({"rl": {"algorithm": {"adv_estimator": "nice"}}})
    for _ in range(2):
        with pytest.raises(StageError, match="nice"):
            check_on_flyte(config)


@pytest.mark.parametrize(
    "change",
    [
        {"rl": {"plugins": ["my_rewards"]}},
        {"rl": {"algorithm": {"teacher": "/models/teacher"}}},
        {"rl": {"reward": {"name": "my_rewards:length"}}},
    ],
)
def test_what_changes_by_itself_is_always_checked(change: dict[str, Any]) -> None:
    assert checks_key(RLHFConfig())
    assert not checks_key(RLHFConfig.model_validate(change))
