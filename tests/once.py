"""The type of the fixture `make_once`; see `conftest`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MakeOnce = Callable[[str, Callable[[Path], None]], Path]
