"""From files and dictionaries to a configuration, and from mistakes to sentences."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from engine.config.pipeline import PipelineConfig
from engine.errors import ConfigError
from engine.redaction import presentable

PRESETS = Path(__file__).parent / "presets"
PRESET = "preset:"


def config_path(given: str | Path) -> Path:
    """The file that is meant: a path, or a shipped one as `preset:NAME`.

    Raises ConfigError for an unknown preset, with the names there are.
    """
    text = str(given)
    if not text.startswith(PRESET):
        return Path(text).expanduser()
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    name = text.removeprefix(PRESET)
    if name not in names:
        raise ConfigError(f"config {text}: there is no such preset; give one of {', '.join(names)}")
    return PRESETS / f"{name}.yaml"


def digest(section: BaseModel) -> str:
    """Return the SHA-256 (hex) of a section's values, whatever the order of its keys."""
    canonical = json.dumps(section.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def parse_config(values: dict[str, Any]) -> PipelineConfig:
    """Build a PipelineConfig; raise ConfigError with one line a wrong key."""
    try:
        return PipelineConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def load_config(path: str | Path) -> PipelineConfig:
    """Read a YAML or JSON file, or `preset:NAME`.

    Raises ConfigError when it is missing, malformed or wrong.
    """
    file = config_path(path)
    try:
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"config file {path} does not exist; give the path of a YAML file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} can't be read: {error}; give a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(
            f"config file {path} holds a {type(values).__name__}; its top level must be sections "
            "such as `data:` and `rl:`"
        )
    return parse_config(values or {})


def explain(error: ValidationError) -> str:
    """Turn pydantic's report into sentences that name the field, the value and the way out."""
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown setting {field!r}; check its spelling and its section")
        elif item["type"] == "value_error":
            lines.append(item["msg"].removeprefix("Value error, "))
        elif field:
            lines.append(f"{field}={item['input']!r}: {item['msg']}")
        else:
            lines.append(item["msg"])
    return presentable("; ".join(lines))
