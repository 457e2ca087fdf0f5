"""Keeps transformers from importing scikit-learn and SciPy, and accelerate from importing boto3.

They import them wherever they are installed: for assisted generation, for a loss of object
detection, for SageMaker's settings. That would slow down the start of every Ray worker, rank and
command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Module → the availability check that it must find false, and the module that it takes it from.
_CHECKS = {
    "transformers.generation.candidate_generator": ("transformers.utils", "is_sklearn_available"),
    "transformers.loss.loss_for_object_detection": ("transformers.utils", "is_scipy_available"),
    "accelerate.commands.config.sagemaker": ("accelerate.utils.imports", "is_boto3_available"),
}


class _AvailabilityHook(MetaPathFinder):
    """Finds no module; acts before one of `_CHECKS` is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _CHECKS:
            source, check = _CHECKS[name]
            setattr(sys.modules[source], check, lambda: False)
        return None


def skip_optional_imports() -> None:
    """Keep transformers and accelerate from importing what is not used here; idempotent."""
    if not any(isinstance(finder, _AvailabilityHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AvailabilityHook())
