"""The rollout engine `native`; see `engine.py`, and `tp_shards.py` for tensor-parallel ranks."""

from engine.rollout.native.decoding_weights import TPModelShard
from engine.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine", "TPModelShard"]
