"""The settings that decide whether two evaluations can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.config import DataConfig, EvaluateConfig
from engine.errors import LineageError
from engine.redaction import redact_values

if TYPE_CHECKING:
    from engine.storage.manifest import Manifest

Settings = dict[str, dict[str, Any]]  # section → key → JSON value


def comparable_settings(data: DataConfig, config: EvaluateConfig) -> Settings:
    """The settings that two evaluations must share to be comparable, as manifests record them.

    Of `data` only the token budget counts; the problems themselves are compared by digest.
    """
    return {
        "data": {"max_response_length": data.max_response_length},
        "evaluate": redact_values(config.model_dump(mode="json")),
    }


def recorded_settings(evaluation: Manifest) -> Settings:
    """`comparable_settings` as an evaluation's manifest records them; LineageError if missing."""
    found: Settings = {}
    for key in ("data", "evaluate"):
        value = evaluation.config.get(key)
        if not isinstance(value, dict):
            raise LineageError(
                f"the evaluation {evaluation.digest[:12]} has no record of its settings {key!r}, "
                "so nothing can be compared with it; evaluate the model again"
            )
        found[key] = value
    return found


def require_same_settings(evaluation: Manifest, data: DataConfig, config: EvaluateConfig) -> None:
    """Raise LineageError where an evaluation was made under other settings than these."""
    found = recorded_settings(evaluation)
    for section, wanted in comparable_settings(data, config).items():
        for key in sorted(wanted.keys() | found[section].keys()):
            here, there = wanted.get(key), found[section].get(key)
            if here != there:
                raise LineageError(
                    f"{section}.{key} is {here!r}, and the evaluation {evaluation.digest[:12]} was "
                    f"made with {there!r}; give the settings of that run, or evaluate again"
                )
