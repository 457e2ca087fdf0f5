"""The rollout engine `native`: decodes with the trainer's own parameters, copying none of them.

`engine` is its front; `scheduler` batches, `sequences` has the tokens, `llama_decoder` and
`decoder` compute, `decoding_weights` looks the weights up.
"""

from engine.rollout.native.decoding_weights import TPModelShard
from engine.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine", "TPModelShard"]
