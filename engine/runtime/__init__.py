"""A causal language model that is trained and sampled from in one storage; see `actor.py`."""

from engine.runtime.hybrid_actor import HybridActor, HybridConfig, measure_switch_overhead

__all__ = ["HybridActor", "HybridConfig", "measure_switch_overhead"]
