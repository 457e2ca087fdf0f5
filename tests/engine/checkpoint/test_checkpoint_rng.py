"""Generators' states, of which a process with fewer devices loads the first ones."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.checkpoint.state_dict import device_states, process_rng, set_process_rng


def test_fewer_devices_take_the_first_states_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = [torch.full((16,), i, dtype=torch.uint8) for i in range(3)]
    with caplog.at_level(logging.WARNING):
        chosen = device_states(saved, 2)
    assert [int(state[0]) for state in chosen] == [0, 1]
    assert "generators of 3 GPUs and this process sees 2" in caplog.text
    chosen[0].zero_().add_(7)
    assert int(saved[0][0]) == 0, "the checkpoint's own are left alone"


@pytest.mark.parametrize("devices", [2, 4])
def test_as_many_devices_or_more_take_over_all(
    devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved = [torch.full((16,), i, dtype=torch.uint8) for i in range(2)]
    with caplog.at_level(logging.WARNING):
        assert [int(state[0]) for state in device_states(saved, devices)] == [0, 1]
    assert caplog.text == ""


def test_a_checkpoint_of_a_process_with_more_gpus_than_any_machine_has_is_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = process_rng()
    wanted = torch.rand(3)
    here = state.get("cuda", [])
    spare = [torch.zeros(16, dtype=torch.uint8)] * 2
    with caplog.at_level(logging.WARNING):
        set_process_rng(state | {"cuda": [*here, *spare]})
    assert torch.equal(torch.rand(3), wanted)
    assert "the others are left out" in caplog.text
