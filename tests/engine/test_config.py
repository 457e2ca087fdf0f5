"""Configuration: wrong settings are refused with the field, the value and the way out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import PipelineConfig, digest, load_config, parse_config
from engine.errors import ConfigError


def nested(path: str, value: Any) -> dict[str, Any]:
    out: Any = value
    for key in reversed(path.split(".")):
        out = {key: out}
    return dict(out)


STEP = {"trainer": {"train_batch_size": 8}, "rollout": {"n": 4}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rl": {**STEP, "actor": {"ppo_mini_batch_size": 33}}},
            r"actor.ppo_mini_batch_size=33 is more than the 32 completions of a step",
        ),
        (
            {"rl": {**STEP, "critic": {"ppo_mini_batch_size": 33}}},
            r"critic.ppo_mini_batch_size=33 is more than the 32 completions of a step",
        ),
        (
            {"model": {"hidden_size": 130, "num_attention_heads": 4, "num_key_value_heads": 2}},
            "hidden_size=130 must be a multiple of num_attention_heads=4",
        ),
        (
            {"model": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 3}},
            "num_attention_heads=4 must be a multiple of num_key_value_heads=3",
        ),
        (
            {"evaluate": {"samples": 2, "k": 3}},
            "evaluate.samples=2 must be at least evaluate.k=3",
        ),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", -1),
        ("data.difficulty", 6),
        ("sft.optim.lr", 0.0),
        ("sft.optim.lr", math.inf),
        ("sft.optim.lr", math.nan),
        ("sft.optim.beta2", 1.0),
        ("sft.optim.warmup_ratio", 1.0),
        ("rl.actor.clip_ratio", 1.0),
        ("rl.actor.clip_ratio_c", 1.0),
        ("rl.rollout.temperature", 0.0),
        ("rl.rollout.top_p", 0.0),
        ("rl.reward.timeout_s", math.inf),
        ("rl.trainer.placement", "cloud"),
        ("rl.algorithm.gamma", 1.1),
        ("rl.algorithm.kl_ctrl.horizon", 0),
        ("promote.alias", ""),
    ],
)
def test_values_out_of_range_name_field_and_value(path: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(nested(path, value))
    assert f"{path}={value!r}: " in str(caught.value)
    assert " should " in str(caught.value)


def test_unknown_keys_are_all_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"rl": {"rollout": {"temprature": 1}}, "dta": {}})
    assert str(caught.value) == (
        "unknown setting 'rl.rollout.temprature'; check its spelling and its section; "
        "unknown setting 'dta'; check its spelling and its section"
    )


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        PipelineConfig().seed = 3  # type: ignore[misc]


@given(st.permutations(["seed", "data", "model", "sft", "rl"]), st.booleans())
def test_digest_doesn_t_see_the_order_of_keys(order: list[str], spelled_out: bool) -> None:
    values = {"seed": 1, "sft": {"optim": {"lr": 1, "schedule": "linear"}}, "rl": {}}
    shuffled = {key: values[key] for key in order if key in values}
    if spelled_out:
        shuffled["rl"] = {"rollout": {"n": PipelineConfig().rl.rollout.n}}
        shuffled["sft"] = {"optim": {"schedule": "linear", "lr": 1.0}}
    assert digest(parse_config(shuffled)) == digest(parse_config(values))


def test_digest_sees_every_change() -> None:
    base = digest(PipelineConfig())
    assert len(base) == 64
    for path, value in (("seed", 1), ("rl.rollout.n", 5), ("rl.algorithm.kl_ctrl.kl_coef", 0.2)):
        assert digest(parse_config(nested(path, value))) != base


def test_yaml_and_json_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 3\nsft: {optim: {lr: 1e-4}}\n")
    config = load_config(tmp_path / "a.yaml")
    assert (config.seed, config.sft.optim.lr) == (3, 1e-4)
    (tmp_path / "b.json").write_text('{"seed": 3, "sft": {"optim": {"lr": 0.0001}}}')
    assert load_config(tmp_path / "b.json") == config
    (tmp_path / "empty.yaml").write_text("# all defaults\n")
    assert load_config(tmp_path / "empty.yaml") == PipelineConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: [1", "is not valid YAML"),
        ("- seed", "holds a list; its top level must be sections"),
        ("seed", "holds a str"),
        ("seed: soon", "seed='soon': Input should be a valid integer"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "c.yaml")


def test_files_that_can_t_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path)
    (tmp_path / "d.yaml").write_bytes(b"seed: \xff\xfe")
    with pytest.raises(ConfigError, match=r"can't be read|not valid YAML"):
        load_config(tmp_path / "d.yaml")
