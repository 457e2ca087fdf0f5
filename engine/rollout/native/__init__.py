"""The rollout engine `native`; see `engine.py`, and `sliced.py` for tensor-parallel ranks."""

from engine.rollout.native.engine import NativeEngine
from engine.rollout.native.tp_shards import SlicedModel

__all__ = ["NativeEngine", "SlicedModel"]
