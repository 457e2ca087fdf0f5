"""Literal types of our pydantic models: derived once, and without flytekit's warnings."""

from __future__ import annotations

import logging

from flytekit.core.type_engine import TypeEngine
from flytekit.loggers import logger
from pydantic import BaseModel, JsonValue

from tasks.flytekit_setup import cache_literal_types


class WithFieldsOfNoType(BaseModel):
    """What Flyte has no type for travels in the model's JSON."""

    options: dict[str, JsonValue] = {}
    names: tuple[str, ...] = ()


def test_a_literal_type_is_derived_once_without_a_warning() -> None:
    cache_literal_types()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        first = TypeEngine.to_literal_type(WithFieldsOfNoType)
        assert TypeEngine.to_literal_type(WithFieldsOfNoType) is first
        assert logger.level == logging.WARNING
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert said == []
    assert first.metadata is not None
