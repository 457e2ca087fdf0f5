"""The algorithms as they read in a paper: one short function a family, found by name.

Read `recipes` first; `algo` is the arithmetic between the roles' calls.
"""

from engine.dataflows.algo import choose_dataflow, register_dataflow

__all__ = ["choose_dataflow", "register_dataflow"]
