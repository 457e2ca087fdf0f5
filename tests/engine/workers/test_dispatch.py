"""What `@dispatch` makes of a method: an ordinary one on a worker, with its rule on the class."""

from __future__ import annotations

import cloudpickle
import pytest
from probe_worker import Probe

from engine.batch import TOKENS
from engine.errors import WorkerError
from engine.workers.frozen_models import ReferenceWorker
from engine.workers.role import Dispatch, DispatchRule, WorkerContext, dispatch, dispatch_rule


def test_on_a_worker_it_is_an_ordinary_method() -> None:
    worker = Probe(WorkerContext("probe"))
    assert worker.nap(0.0) == 0.0
    assert worker.nap(seconds=0.0) == 0.0

    class Louder(Probe):
        @dispatch(Dispatch.RANK_ZERO)
        def whoami(self) -> tuple[str, int, int, int]:
            role, *numbers = super().whoami()
            return (role.upper(), *numbers)

    louder = cloudpickle.loads(cloudpickle.dumps(Louder))  # as Ray sends a class of a script
    assert louder(WorkerContext("probe")).whoami()[:3] == ("PROBE", 0, 1)
    assert dispatch_rule(louder, "whoami").mode is Dispatch.RANK_ZERO


def test_the_class_has_its_rule_and_its_words() -> None:
    rule = dispatch_rule(ReferenceWorker, "log_probs")
    writes = frozenset({"ref_log_probs"})
    assert rule == DispatchRule(Dispatch.DATA_PARALLEL, 1, True, frozenset(TOKENS), writes)
    assert ReferenceWorker.log_probs.__doc__ == "`ref_log_probs [B, R]`."


@pytest.mark.parametrize("method", ["unmarked", "missing"])
def test_other_methods_have_none(method: str) -> None:
    with pytest.raises(WorkerError, match=rf"Probe\.{method} can't be called on a group"):
        dispatch_rule(Probe, method)
