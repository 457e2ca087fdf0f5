"""Configurations as text: read from files and dictionaries, and listed with their meaning."""

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from engine.config.base import section_of
from engine.config.pipeline import PipelineConfig
from engine.errors import ConfigError
from engine.redaction import presentable

PRESETS = Path(__file__).parent / "presets"
PRESET = "preset:"
M = TypeVar("M", bound=BaseModel)


def config_path(source: str | Path) -> Path:
    """Return the file of a path, or of `preset:NAME`; ConfigError for an unknown preset."""
    text = str(source)
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


def validated(section: type[M], values: object, where: str = "") -> M:
    """Build a section; raise ConfigError, which begins with `where`, with one line a wrong key."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}{explain(error, section)}") from None


def parse_config(values: dict[str, object]) -> PipelineConfig:
    """Build a PipelineConfig as `validated` does."""
    return validated(PipelineConfig, values)


def load_config(path: str | Path) -> PipelineConfig:
    """Read a YAML or JSON file, or `preset:NAME`; ConfigError when it is missing or wrong."""
    return parse_config(read_settings(str(path)))


def read_settings(text: str) -> Any:
    """Return JSON values of a path, `preset:NAME` or JSON text; ConfigError for what is none.

    A top-level key `preset` names the preset that the other values change.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            values = json.loads(text)
        except ValueError as error:
            hint = "give the path of a YAML or JSON file, preset:NAME, or JSON text"
            raise ConfigError(f"config is not valid JSON ({error}); {hint}") from None
    else:
        values = read_yaml(config_path(text), f"config file {text}")
        # JSON has no dates; as text they fail with their field's name.
        values = json.loads(json.dumps(values, default=str))
    if isinstance(values, dict) and "preset" in values:
        preset = read_settings(f"{PRESET}{values.pop('preset')}")
        return deep_update(preset, values)
    return values


def deep_update(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with `changes` on top, section by section."""
    return values | {
        key: deep_update(values[key], change)
        if isinstance(change, dict) and isinstance(values.get(key), dict)
        else change
        for key, change in changes.items()
    }


def read_yaml(file: Path, name: str) -> dict[str, object]:
    """Return the sections of a YAML file, which messages call `name`; raises ConfigError."""
    try:
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{name} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} can't be read: {error}; give a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"{name} holds a {type(values).__name__}, and no sections such as `rl:`")
    return values or {}


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Turn pydantic's report on a `model` into sentences with field, value and way out."""
    lines = []
    for item in error.errors():
        field = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            known = list(_known_settings(model, item["loc"]))
            hint = "check its spelling and its section (`python -m engine.config` lists all)"
            lines.append(f"unknown setting {field!r}; {suggestion(field, known) or hint}")
        elif item["type"] == "value_error":
            lines.append(item["msg"].removeprefix("Value error, "))
        elif field:
            lines.append(f"{field}={item['input']!r}: {item['msg']}")
        else:
            lines.append(item["msg"])
    return presentable("; ".join(lines))


def _known_settings(model: type[BaseModel], field: Sequence[int | str]) -> Iterator[str]:
    """Yield the settings that an unknown field may stand for; an entry of a list has its own."""
    kind: Any = model
    start, entry = 0, model
    for depth, name in enumerate(field[:-1], 1):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(name)].annotation
            kind = section_of(kind) or kind
        else:  # tuple[Entry, ...] or dict[str, Entry]
            kind = entry = next(filter(None, map(section_of, get_args(kind))))
            start = depth
    yield from _paths(entry, "".join(f"{name}." for name in field[:start]))


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        yield from _paths(section, f"{prefix}{name}.") if section else [prefix + name]


def suggestion(field: str, known: Sequence[str]) -> str:
    """Say which of the `known` dotted names an unknown one may stand for; empty: none is near."""
    section, _, name = field.rpartition(".")
    prefix = f"{section}." if section else ""
    inside = [path.removeprefix(prefix) for path in known if path.startswith(prefix)]
    names = list(dict.fromkeys(path.partition(".")[0] for path in inside))
    near = [prefix + name for name in difflib.get_close_matches(name, names, 1)]
    top = f"{section.partition('.')[0]}." if section else ""
    near = near or [p for p in known if p.startswith(top) and p.endswith(f".{name}")]
    if 0 < len(near) < 4:
        return f"did you mean {' or '.join(near)}?"
    if section and 0 < len(names) < 20:
        return f"{section} has {', '.join(names)}"
    return ""


INTRODUCTION = """\
# Configuration

Every setting of the pipeline. `--config` of the workflows takes them as YAML or JSON; a section
that is given in part keeps the other defaults of its place. `preset: ppo` beside the sections keeps
the values of `engine/config/presets/ppo.yaml` instead. `python -m engine.main_ppo` takes the same
paths, and verl's names for them (`--help`). This page is what `python -m engine.config`
prints.

For completion in an editor, write the JSON schema to a file with
`python -m engine.config --json-schema > hybridflyte.schema.json` and begin your YAML file with
`# yaml-language-server: $schema=hybridflyte.schema.json`.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that can be set."""

    path: str  # e.g. "rl.actor.optim.lr"
    default: str  # as YAML, e.g. "1.0e-06"
    about: str  # its meaning, and "one of …" where only some values go


def sections(
    model: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None
) -> Iterator[tuple[str, type[BaseModel], list[Setting]]]:
    """Yield each section's path (empty for the root), its class and its own settings, in order.

    `defaults`: of the place that the section stands in; without them, its own.
    """
    defaults = model() if defaults is None else defaults
    inner: list[tuple[str, type[BaseModel]]] = []
    settings: list[Setting] = []
    declared = vars(model).get("__annotations__", {})
    fields = model.model_fields
    for name in sorted(fields, key=lambda name: name not in declared):  # a base's come last
        info = fields[name]
        if (section := section_of(info.annotation)) is not None:
            inner.append((name, section))
            continue
        about = [" ".join((info.description or "").split())]  # a docstring may have two lines
        if get_origin(info.annotation) is Literal:
            about.append("one of " + ", ".join(map(as_yaml, get_args(info.annotation))))
        default = as_yaml(getattr(defaults, name))
        settings.append(Setting(f"{prefix}{name}", default, "; ".join(filter(None, about))))
    yield prefix.rstrip("."), model, settings
    for name, section in inner:
        yield from sections(section, f"{prefix}{name}.", getattr(defaults, name))


def as_yaml(value: object) -> str:
    """Return a default as one writes it in YAML, on one line."""
    text = yaml.safe_dump(
        to_jsonable_python(value), default_flow_style=True, width=1 << 20, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def summary(model: type[BaseModel]) -> str:
    """Return the first sentence of a section's docstring."""
    return (model.__doc__ or "").strip().splitlines()[0]


def markdown() -> str:
    """Return the reference as a page: a heading and a table for each section."""
    parts = [INTRODUCTION]
    for path, model, settings in sections(PipelineConfig):
        if not settings:
            continue
        table = ["| setting | default | meaning |", "| --- | --- | --- |"]
        for setting in settings:
            name, about = setting.path.rpartition(".")[2], setting.about.replace("|", "\\|")
            table.append(f"| `{name}` | `{setting.default}` | {about} |")
        head = f"## `{path}`" if path else "## Top level"
        parts.append("\n".join([head, "", summary(model), "", *table, ""]))
    return "\n".join(parts)
