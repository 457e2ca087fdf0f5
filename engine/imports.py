"""Keeps transformers from importing scikit-learn and SciPy.

transformers imports them wherever they are installed, for assisted generation and for a loss of
object detection; MLflow installs both. That would slow down the start of every Ray worker, rank and
command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Module of transformers → the availability check that it must find false.
_CHECKS = {
    "transformers.generation.candidate_generator": "is_sklearn_available",
    "transformers.loss.loss_for_object_detection": "is_scipy_available",
}


class _AvailabilityHook(MetaPathFinder):
    """Finds no module; acts before one of `_CHECKS` is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _CHECKS:
            setattr(sys.modules["transformers.utils"], _CHECKS[name], lambda: False)
        return None


def skip_optional_imports() -> None:
    """Keep transformers from importing what is not used here; idempotent."""
    if not any(isinstance(finder, _AvailabilityHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AvailabilityHook())
