"""The base of all sections. What a section holds is its own file's matter."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )
