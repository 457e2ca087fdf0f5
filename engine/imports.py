"""A shorter way to transformers: without scikit-learn and SciPy.

transformers imports them, wherever they are installed, for one curve of assisted generation and one
loss of object detection; MLflow installs both. Every Ray worker, rank and command would pay for
that at its start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The module that is about to be loaded, and the question whose answer becomes no.
_ASKS = {
    "transformers.generation.candidate_generator": "is_sklearn_available",
    "transformers.loss.loss_for_object_detection": "is_scipy_available",
}


class _Spared(MetaPathFinder):
    """Finds nothing; sees which modules are about to be loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _ASKS:
            setattr(sys.modules["transformers.utils"], _ASKS[name], lambda: False)
        return None


def spare_imports() -> None:
    """Keep transformers from importing what is never used here; again has no effect."""
    if not any(isinstance(finder, _Spared) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Spared())
