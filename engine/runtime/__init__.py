"""One policy on this process's ranks: trained and sampled from in one storage.

Read `policy_runtime` first, which joins a `sharded_model`, its `optimizer` and its
`rollout_weights`; `hybrid_actor` gives it to notebooks and training scripts.
"""

from engine.runtime.hybrid_actor import HybridActor, HybridConfig, measure_switch_overhead

__all__ = ["HybridActor", "HybridConfig", "measure_switch_overhead"]
