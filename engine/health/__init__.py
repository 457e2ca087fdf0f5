"""Whether a machine, container or Ray cluster can do the work: `python -m engine.health`.

`libraries` and devices, `service_checks` of storage and MLflow, the nodes of a `cluster`; `report`
has the types that they share.
"""

from engine.health.report import Expectation, HealthFinding

__all__ = ["Expectation", "HealthFinding"]
