"""Whether a machine, container or Ray cluster can do the work: `python -m engine.health`.

`libraries` and devices, `places` that a run writes to, the nodes of a `cluster`; `report` has the
values that they share.
"""

from engine.health.report import Expectation, Finding

__all__ = ["Expectation", "Finding"]
