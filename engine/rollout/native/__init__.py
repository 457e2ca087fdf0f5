"""The rollout engine `native`; see `engine.py`, and `tp_shards.py` for tensor-parallel ranks."""

from engine.rollout.native.engine import NativeEngine
from engine.rollout.native.tp_shards import TPModelShard

__all__ = ["NativeEngine", "TPModelShard"]
