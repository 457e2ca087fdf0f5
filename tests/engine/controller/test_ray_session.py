"""A Ray that does not start: one sentence, whatever Ray raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray

from engine.controller.launch import ray_session
from engine.errors import PlacementError, WorkerError

# Of Ray 2.5x, `ray._private.node`; it is raised as an Exception and no more.
TIMED_OUT = "The current node timed out during startup. This could happen because of many things."


def failing(error: Exception) -> Callable[..., None]:
    def init(**options: object) -> None:
        raise error

    return init


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        (
            "",
            Exception(TIMED_OUT),
            "timed out during startup; run again when",
        ),
        ("", AssertionError(), "could not be started: AssertionError; run again"),
        (
            "127.0.0.1:9",
            ConnectionError("no GCS\nthere"),
            "started at RAY_ADDRESS=127.0.0.1:9: no GCS; check the address",
        ),
    ],
)
def test_a_failed_start_is_one_sentence(
    address: str, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", failing(error))
    kind = PlacementError if address else WorkerError
    with pytest.raises(kind) as raised, ray_session("ray"):
        pass
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
