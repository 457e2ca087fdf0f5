"""The stages of a pipeline as plain functions: run, settings and inputs → artifact.

A stage reads the artifacts of stages before it, computes with the rest of the engine, and publishes
an artifact with a manifest. It knows no workflow engine: `tasks/` makes Flyte tasks of these
functions. Read `stage.py` first (the frame that all share), then `training.py`.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `stages.training` and others on first use, as most load torch."""
    if name.startswith("_"):
        raise AttributeError(name)
    return import_module(f"{__name__}.{name}")
