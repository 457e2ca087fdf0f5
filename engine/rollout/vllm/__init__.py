"""The rollout engine `vllm`; see `engine.py`. Importing this does not import vLLM."""

from engine.rollout.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
