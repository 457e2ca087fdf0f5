"""Reading `--config`."""

from __future__ import annotations

from pathlib import Path

import pytest
import rich_click as click

from tasks.inputs import RLHFConfig, read_settings


def test_json_text() -> None:
    assert read_settings(' {"rl": {"rollout": {"n": 4}}}') == {"rl": {"rollout": {"n": 4}}}


@pytest.mark.parametrize("name", ["c.yaml", "c.yml", "c.json", "c"])
def test_files_whatever_their_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"seed": 3, "data": {"source": "gsm8k"}}')
    assert read_settings(str(path)) == {"seed": 3, "data": {"source": "gsm8k"}}


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing changed\n")
    assert read_settings(str(path)) == {}


def test_small_numbers_as_yaml_writes_them(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as text; the configuration must not."""
    path = tmp_path / "c.yaml"
    path.write_text("rl: {actor: {optim: {lr: 1e-3}}}")
    config = RLHFConfig.model_validate(read_settings(str(path)))
    assert config.rl.actor.optim.lr == 1e-3


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(click.UsageError, match="can't be read"):
        read_settings(str(path))


def test_two_faults_are_both_named() -> None:
    with pytest.raises(click.UsageError) as caught:
        RLHFConfig.model_validate_json('{"sed": 1, "data": {"test_size": 0}}')
    assert "'sed'" in str(caught.value)
    assert "data.test_size=0" in str(caught.value)


def test_a_preset_by_its_name() -> None:
    config = RLHFConfig.model_validate(read_settings("preset:gsm8k-7b-8gpu"))
    assert config.model.path == "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(click.UsageError, match=r"preset:nope.*no such preset.*ppo"):
        read_settings("preset:nope")
