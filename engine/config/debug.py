"""What a run leaves for a look at single steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from engine.config.base import Section

RECORDS = "recorded"  # folder of the records, beside the checkpoints


class DebugConfig(Section):
    """Records of steps, for `python -m engine.replay`."""

    record_steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Steps, e.g. [3, 40], whose inputs and state are written to recorded/ beside "
        "the checkpoints",
    )
    record_failed: bool = Field(
        False,
        description="The same for steps that end in an error or with a metric that is not finite; "
        "each step then waits for a write of the state that it begins with",
    )

    @property
    def enabled(self) -> bool:
        """Whether any step may be recorded."""
        return bool(self.record_steps) or self.record_failed
