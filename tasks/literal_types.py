"""Two patches of flytekit's types: cached literal types, and errors given to failure handlers."""

from __future__ import annotations

import functools
from typing import Any

from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.models.literals import Scalar
from flytekit.models.types import Error


def cache_literal_types() -> None:
    """Cache the literal type that flytekit derives for a pydantic model; idempotent.

    flytekit derives it, with a JSON schema, for every input of every task, and a stage has one task
    per profile: uncached, this is half of the start-up time of `pyflyte run`.
    """
    derive: Any = PydanticTransformer.get_literal_type
    if not hasattr(derive, "cache_info"):
        cached: Any = functools.cache(derive)
        PydanticTransformer.get_literal_type = cached


def convert_error_literals() -> None:
    """Convert an error literal to flytekit's own class; idempotent.

    flytekit leaves the protobuf in place and then fails to print it while it tries the variants of
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
