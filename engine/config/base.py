"""The base class of all sections."""

from __future__ import annotations

import types
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Options = dict[str, JsonValue]
"""Options of a registered entry, by name; the entry declares them, and checks names and types."""


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float):
            raise PydanticCustomError("not_a_number", "give a number, not true or false")
        return value


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of this annotation holds, or may hold; None for a plain value."""
    kinds = get_args(annotation) if get_origin(annotation) is types.UnionType else (annotation,)
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return found[0] if found else None
