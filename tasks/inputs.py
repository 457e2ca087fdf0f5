"""The pipeline's input as Flyte and its command line see it.

`--config` is JSON text, the path of a YAML or JSON file, or `preset:NAME`. Whatever is wrong with
it reaches the terminal as one sentence.
"""

import sys
from typing import Any, Self

import rich_click as click
from flytekit.interaction import click_types
from pydantic import ValidationError

from engine.config import PipelineConfig, explain
from engine.config.text import read_settings
from engine.errors import ConfigError


class RLHFConfig(PipelineConfig):
    """`PipelineConfig` whose faults reach the terminal as one sentence."""

    @classmethod
    def model_validate_json(cls, *arguments: Any, **options: Any) -> Self:
        """Parse JSON; a wrong setting is a usage error that names it."""
        try:
            return super().model_validate_json(*arguments, **options)
        except ValidationError as error:
            raise click.UsageError(f"config: {explain(error, cls)}") from None


class ConfigParam(click_types.JsonParamType):
    """flytekit's reader of JSON inputs, which for a configuration says what is wrong with it."""

    @property
    def is_config(self) -> bool:
        return isinstance(self._python_type, type) and issubclass(self._python_type, PipelineConfig)

    def _parse(self, value: Any, param: click.Parameter | None) -> Any:
        if isinstance(value, str) and self.is_config:
            try:
                return read_settings(value)
            except ConfigError as error:
                raise click.UsageError(str(error)) from None
        return super()._parse(value, param)


def _refuse_a_second(option: click.Option) -> None:
    """Raise UsageError where an option is given twice, of which click would take the last."""
    cast = option.type_cast_value

    def cast_one(context: click.Context, value: Any) -> Any:
        option.multiple = False
        if isinstance(value, list):
            value, *more = value
            if more:
                raise click.UsageError(
                    f"{option.opts[0]} is given {len(more) + 1} times; give one, whose key "
                    """`preset` names a preset to change: '{"preset": "ppo", "seed": 1}'"""
                )
        return cast(context, value)

    option.multiple, option.type_cast_value = True, cast_one  # type: ignore[assignment]


def use_config_param() -> None:
    """Let `pyflyte run` read configurations by `ConfigParam`, and help say what one is.

    flytekit 1.16 prints a traceback for a malformed YAML file, and the whole JSON schema as help.
    """
    click_types.JsonParamType = ConfigParam
    run: Any = sys.modules.get("flytekit.clis.sdk_in_container.run")
    if run is None or hasattr(run.to_click_option, "without_schema"):
        return
    make = run.to_click_option

    def to_click_option(*arguments: object, **named: object) -> click.Option:
        option: click.Option = make(*arguments, **named)
        option.opts = [*dict.fromkeys(option.opts)]  # a flag is there twice, of which click warns
        if isinstance(option.type, ConfigParam) and option.type.is_config:
            _refuse_a_second(option)
            option.help = (option.help or "").partition(": {")[0]
            option.show_default = "those of `python -m engine.config`"
        return option

    to_click_option.without_schema = True  # type: ignore[attr-defined]
    run.to_click_option = to_click_option


use_config_param()
