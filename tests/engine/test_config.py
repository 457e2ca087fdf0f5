"""The configuration and its reference."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from engine.cli.settings import PreferenceRunConfig, RewardModelRunConfig, RunConfig
from engine.config import OptimConfig, PipelineConfig, Section, digest, load_config, parse_config
from engine.config.text import markdown, sections
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


def test_unknown_keys_are_all_listed_with_what_may_be_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"rl": {"rollout": {"temprature": 1}, "lora": {}}, "dta": {}, "bar": 1})
    assert str(caught.value) == (
        "unknown setting 'rl.rollout.temprature'; did you mean rl.rollout.temperature?; "
        "unknown setting 'rl.lora'; did you mean rl.rollout.lora?; "
        "unknown setting 'dta'; did you mean data?; unknown setting 'bar'; "
        "check its spelling and its section (`python -m engine.config` lists all)"
    )
    with pytest.raises(ConfigError, match=r"'tracking.foo'; tracking has experiment, logger, p"):
        parse_config({"tracking": {"foo": 1}})


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("rl.trainer.pools.0.role", "did you mean rl.trainer.pools.0.roles?"),
        ("rl.trainer.pools.0.name", "rl.trainer.pools.0 has roles, cpus, gpus, resources, labels"),
        ("rl.reward.components.style.nam", "did you mean rl.reward.components.style.name?"),
        ("rl.reward.sources.gsm8k.option", "did you mean rl.reward.sources.gsm8k.options?"),
        (
            "rl.algorithm.distillation.teachers.0.modl",
            "did you mean rl.algorithm.distillation.teachers.0.model?",
        ),
        ("data.evaluation_sets.0.nme", "did you mean data.evaluation_sets.0.name?"),
        ("promote.guards.0.metrc", "did you mean promote.guards.0.metric?"),
    ],
)
def test_unknown_settings_of_an_entry_are_compared_with_the_entrys(path: str, hint: str) -> None:
    values: object = 1
    for name in reversed(path.split(".")):
        values = [values] if name == "0" else {name: values}
    with pytest.raises(ConfigError) as caught:
        parse_config(cast(dict[str, object], values))
    assert f"unknown setting {path!r}; {hint}" in str(caught.value)


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


ROOTS = (PipelineConfig, RunConfig, PreferenceRunConfig, RewardModelRunConfig)


def leaves(section: Section, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every setting below a section by its path, with its value."""
    for name, value in section:
        path = (*prefix, name)
        if isinstance(value, Section):
            yield from leaves(value, path)
        else:
            yield path, value


@pytest.mark.parametrize("root", ROOTS)
def test_a_setting_given_its_default_changes_nothing(root: type[Section]) -> None:
    settings = dict(leaves(root()))
    assert len(settings) > 50
    for path, value in settings.items():
        assert root.model_validate(nested(".".join(path), value)) == root(), path


@given(st.sampled_from(ROOTS), st.data())
def test_sections_given_in_part_keep_the_defaults_of_their_place(
    root: type[Section], data: st.DataObject
) -> None:
    settings = dict(leaves(root()))
    chosen = data.draw(st.sets(st.sampled_from(sorted(settings)), max_size=8))
    values: dict[str, Any] = {}
    for *path, name in chosen:
        place = reduce(lambda inner, section: inner.setdefault(section, {}), path, values)
        place[name] = settings[(*path, name)]
    optim = [each for each in settings if each[-2:] == ("optim", "lr")]
    for *path, name in optim:
        reduce(lambda inner, section: inner.setdefault(section, {}), path, values)[name] = 0.125
    assert dict(leaves(root.model_validate(values))) == settings | dict.fromkeys(optim, 0.125)


def test_a_default_section_inside_a_default_section_is_kept() -> None:
    class Inner(Section):
        a: int = 1
        b: int = 2
        options: dict[str, int] = Field({})

    class Middle(Section):
        inner: Inner = Inner(b=3)
        c: int = 4

    class Outer(Section):
        middle: Middle = Middle(inner=Inner(a=5))
        optional: Inner | None = Inner(b=6, options={"x": 1})

    assert Outer.model_validate({"middle": {"c": 7}}).middle == Middle(inner=Inner(a=5), c=7)
    assert Outer.model_validate({"middle": {"inner": {}}}).middle.inner == Inner(a=5, b=2)
    assert Outer.model_validate_json('{"middle": {"inner": {"b": 8}}}').middle.inner == Inner(
        a=5, b=8
    )
    assert Outer.model_validate({"optional": {"a": 0}}).optional == Inner(
        a=0, b=6, options={"x": 1}
    )
    whole = Outer.model_validate({"optional": {"options": {"y": 2}}}).optional
    assert whole == Inner(b=6, options={"y": 2}), "a mapping that is a setting stays whole"
    assert Outer.model_validate({"optional": None}).optional is None
    assert Outer(middle=Middle()).middle.inner == Inner(b=3), "a section as it is"


def test_lr_alone_keeps_schedule_and_decay() -> None:
    config = parse_config(
        {"sft": {"optim": {"lr": 1e-4}}, "rl": {"actor": {"optim": {"lr": 1e-6}}}}
    )
    assert config.sft.optim == OptimConfig(lr=1e-4, schedule="cosine")
    assert config.rl.actor.optim == OptimConfig(lr=1e-6, weight_decay=0.0)


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
        ("- seed", "holds a list, and no sections"),
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


ROOT = Path(__file__).parents[2]


CONFIGS = sorted((ROOT / "engine" / "config" / "presets").glob("*.yaml"))


SETTINGS = [setting for _, _, settings in sections(PipelineConfig) for setting in settings]


def test_every_setting_says_what_it_is() -> None:
    empty = [s.path for s in SETTINGS if not s.about or s.about.startswith("one of ")]
    assert empty == []


def test_the_defaults_are_those_of_the_configuration() -> None:
    values = PipelineConfig().model_dump(mode="json")
    for setting in SETTINGS:
        value = values
        for name in setting.path.split("."):
            value = value[name] if value is not None else None
        if value is not None:  # a section that is left out by default has defaults of its own
            assert yaml.safe_load(setting.default) == value, setting.path


def test_the_page_has_every_setting_under_its_section() -> None:
    page = markdown()
    parts = {part.split("`")[0]: part for part in page.split("\n## `")[1:]}
    for setting in SETTINGS:
        section, _, name = setting.path.rpartition(".")
        assert f"| `{name}` |" in (parts[section] if section else page), setting.path


@pytest.fixture(scope="module")
def schema() -> Any:
    """The schema, itself a valid one."""
    schema = PipelineConfig.model_json_schema()
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_schema_takes_the_shipped_files(path: Path, schema: Any) -> None:
    schema.validate(yaml.safe_load(path.read_text()))


def test_the_schema_takes_a_name_for_a_section_with_a_name_and_refuses_unknown_keys(
    schema: Any,
) -> None:
    schema.validate({"evaluate": {"reward": "exact_match"}})
    with pytest.raises(jsonschema.ValidationError, match="learning_rate"):
        schema.validate({"rl": {"actor": {"optim": {"learning_rate": 1e-6}}}})


def test_the_command_prints_the_page() -> None:
    command = [sys.executable, "-m", "engine.config"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout == markdown()


@pytest.mark.parametrize(
    "preset",
    [
        *("gsm8k-0.5b-1gpu", "gsm8k-1.5b-2gpu", "gsm8k-7b-8gpu"),
        *("full", "classic_rlhf_full", "nightly"),
    ],
)
def test_presets_for_gpus_decode_with_vllm_or_graphs(preset: str) -> None:
    config = load_config(f"preset:{preset}")
    rollout = config.rl.rollout
    if preset.endswith("-1gpu"):
        assert (rollout.engine, rollout.cuda_graphs) == ("native", True)
    else:
        assert (rollout.engine, config.evaluate.engine) == ("vllm", "vllm")
    # What fits is chosen by the GPU's memory.
    assert config.rl.actor.max_tokens_per_micro_batch == 16384
    assert config.rl.actor.parallel.activation_checkpointing is None
