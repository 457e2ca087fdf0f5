"""The reference of all settings: complete, true to the defaults; and the schema for editors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine.config import PipelineConfig
from engine.config.text import markdown, sections

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
