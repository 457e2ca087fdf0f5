"""The base class of all sections."""

import types
from collections.abc import Iterator, Mapping
from typing import Any, Self, get_args, get_origin

import pydantic
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

Options = dict[str, pydantic.JsonValue]
"""Options of a registered entry, by name; the entry declares them, and checks names and types."""


class Section(pydantic.BaseModel):
    """Base of all sections: immutable, and an unknown key is an error.

    A section that is given in part keeps the defaults of the place it stands in: with
    `sft.optim.lr` alone, `sft.optim.schedule` stays SFT's and is not that of `OptimConfig`.
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _keep_field_defaults(cls, values: object) -> Any:
        if not isinstance(values, Mapping):
            return values
        defaults = {name: info.default for name, info in cls.model_fields.items()}
        return {
            name: filled_up(defaults.get(name), value) if isinstance(value, Mapping) else value
            for name, value in values.items()
        }

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: pydantic.ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float):
            raise PydanticCustomError("not_a_number", "give a number, not true or false")
        return value

    def replaced(self, values: Mapping[str, object]) -> Self:
        """Return a copy with other values at dotted paths, e.g. `actor.optim.lr`, unchecked."""
        changes: dict[str, Any] = {}
        for path, value in values.items():
            name, _, rest = path.partition(".")
            section = changes.get(name, getattr(self, name))
            changes[name] = section.replaced({rest: value}) if rest else value
        return self.model_copy(update=changes)

    def contradictions(self) -> Iterator[str]:
        """Yield what is wrong about settings that contradict one another, in sentences."""
        yield from ()

    @pydantic.model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        for sentence in self.contradictions():
            raise ValueError(sentence)
        return self


class NamedSection(Section):
    """A section for which its `name` alone can stand."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: object) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


def filled_up(section: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """Return `values` with the rest from `section`, at every depth; as it is without a section."""
    if not isinstance(section, Section):
        return values
    rest = {name: getattr(section, name) for name in type(section).model_fields}
    return rest | {
        name: filled_up(rest.get(name), value) if isinstance(value, Mapping) else value
        for name, value in values.items()
    }


def section_of(annotation: object) -> type[pydantic.BaseModel] | None:
    """Return the section that a field of this annotation may hold; None for a plain value."""
    kinds = get_args(annotation) if get_origin(annotation) is types.UnionType else (annotation,)
    sections = (k for k in kinds if isinstance(k, type) and issubclass(k, pydantic.BaseModel))
    return next(sections, None)
