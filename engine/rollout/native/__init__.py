"""The rollout engine `native`; see `engine.py`."""

from engine.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
