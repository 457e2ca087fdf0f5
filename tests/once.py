"""The types of the fixtures `make_once` and `own_entries`; see the `conftest`s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

MakeOnce = Callable[[str, Callable[[Path], None]], Path]
OwnEntries = Callable[[Any], None]
