"""The rollout engine `server`; see `engine.py`."""

from engine.rollout.server.engine import ServerEngine

__all__ = ["ServerEngine"]
