"""A causal language model that is trained and sampled from in one storage; see `actor.py`."""

from engine.hybrid.actor import HybridActor
from engine.hybrid.config import HybridConfig
from engine.hybrid.switch import measure_switch_overhead

__all__ = ["HybridActor", "HybridConfig", "measure_switch_overhead"]
