"""Two patches of flytekit's types: cached literal types, and errors given to failure handlers."""

from __future__ import annotations

import functools
import logging
from typing import Any

from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.loggers import logger
from flytekit.models.literals import Scalar
from flytekit.models.types import Error, LiteralType
from pydantic import BaseModel


def cache_literal_types() -> None:
    """Cache the literal type that flytekit derives for a pydantic model; idempotent.

    flytekit derives it, with a JSON schema, for every input of every task, and a stage has one task
    per profile: uncached, this is half of the start-up time of `pyflyte run`. Its warnings are left
    out: a model travels whole, so a field without a Flyte type of its own loses nothing.
    """
    derive: Any = PydanticTransformer.get_literal_type
    if hasattr(derive, "cache_info"):
        return

    @functools.cache
    def derived(transformer: PydanticTransformer, model: type[BaseModel]) -> LiteralType:
        level = logger.level
        logger.setLevel(max(level, logging.ERROR))
        try:
            found: LiteralType = derive(transformer, model)
            return found
        finally:
            logger.setLevel(level)

    patched: Any = derived
    PydanticTransformer.get_literal_type = patched


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
