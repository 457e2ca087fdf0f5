"""The pipeline's input as Flyte and its command line see it."""

from __future__ import annotations

from typing import Any, Self

import rich_click as click
from pydantic import ValidationError

from engine.config import PipelineConfig, explain


class RLHFConfig(PipelineConfig):
    """`PipelineConfig` whose faults reach the terminal as one sentence."""

    @classmethod
    def model_validate_json(cls, *arguments: Any, **options: Any) -> Self:
        """Parse JSON; a wrong setting is a usage error that names it."""
        try:
            return super().model_validate_json(*arguments, **options)
        except ValidationError as error:
            raise click.UsageError(f"config: {explain(error)}") from None
