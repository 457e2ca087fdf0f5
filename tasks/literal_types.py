"""Two places where flytekit's types need help: speed, and the error given to failure handlers."""

from __future__ import annotations

import functools
from typing import Any

from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.literals import Scalar
from flytekit.models.types import Error


def remember_types() -> None:
    """Let flytekit keep the type it has derived for a pydantic model; again has no effect.

    It derives it, JSON schema and all, anew for every input of every task, and a stage registered a
    profile asks for the same ones five times: half of the start of `pyflyte run`.
    """
    derive: Any = PydanticTransformer.get_literal_type
    if not hasattr(derive, "cache_info"):
        remembering: Any = functools.cache(derive)
        PydanticTransformer.get_literal_type = remembering


def read_errors() -> None:
    """Let flytekit read an error as its own class; again has no effect.

    It leaves the protobuf in place, and then fails to print it while it tries the variants of
    `FlyteError | None`.
    """
    if hasattr(Scalar.from_flyte_idl, "reads_errors"):
        return
    read: Any = Scalar.from_flyte_idl

    def with_error(message: Any) -> Scalar:
        scalar: Scalar = read(message)
        if message.HasField("error"):
            scalar._error = Error.from_flyte_idl(message.error)
        return scalar

    with_error.reads_errors = True  # type: ignore[attr-defined]
    Scalar.from_flyte_idl = with_error
