"""Broadcasts of weights: every receiver has the sender's bits, or all members learn the cause."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from rollout_models import build, make_prompts
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from engine.errors import RolloutError, WeightSyncError
from engine.rollout.protocol import SamplingParams
from engine.rollout.trainer_model import merged_weights
from engine.rollout.vllm import weight_broadcast
from engine.rollout.vllm.engine import VllmEngine
from engine.rollout.vllm.weight_broadcast import Member, Named
from engine.weight_transfer import BroadcastRound, end_round

NAMES = ("sampler0", "sampler1", "sampler1")
TENSORS = {
    f"{i}": torch.randn(37 * i + 1, 11).to([torch.float32, torch.bfloat16][i % 2])
    for i in range(40)
} | {"counts": torch.arange(5), "nan": torch.tensor([float("nan"), -0.0])}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Group:
    """A sender and three receivers, in threads."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.members = [Member() for _ in range(4)]
        self.pool = ThreadPoolExecutor(8)

    def round(self, number: int, group: int, deadline_s: float = 20.0) -> BroadcastRound:
        port = self.store.port
        return BroadcastRound(
            "127.0.0.1", port, number, group, NAMES, 0, "gloo", number, deadline_s
        )

    def send(self, round: BroadcastRound, named: Named | None = None) -> Future[None]:
        named = TENSORS.items() if named is None else named
        return self.pool.submit(self.members[0].send, round, round.version, named)

    def receive(
        self, round: BroadcastRound, rank: int, load: Callable[[Named], None] | None = None
    ) -> Future[dict[str, Tensor]]:
        got: dict[str, Tensor] = {}

        def keep(named: Named) -> None:
            got.update({name: tensor.clone() for name, tensor in named})

        def work() -> dict[str, Tensor]:
            self.members[rank].receive(round, rank, load or keep)
            return got

        return self.pool.submit(work)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(weight_broadcast, "CHUNK_BYTES", 1 << 14)  # some tensors are larger
    group = Group()
    yield group
    for member in group.members:
        member.close()
    group.pool.shutdown()


def causes(*calls: Future[Any]) -> list[str]:
    """What the calls have raised, each within their deadline."""
    errors = [call.exception(timeout=20) for call in calls]
    assert all(errors)
    return [str(error) for error in errors]


def test_receivers_have_the_senders_bits_round_after_round(group: Group) -> None:
    for number, first in ((1, 1), (2, 1), (3, 3)):  # a new group, the same, and a new one
        round = group.round(number, first)
        received = [group.receive(round, rank) for rank in (1, 2, 3)]
        group.send(round).result(timeout=20)
        for call in received:
            got = call.result(timeout=20)
            assert got.keys() == TENSORS.keys()
            for name, tensor in TENSORS.items():
                assert got[name].shape == tensor.shape
                assert torch.equal(bits(got[name]), bits(tensor)), name
    assert group.store.num_keys() < 60, "chunks' heads are gone from the store"


def test_floating_point_is_cast_as_a_sampler_has_it(group: Group) -> None:
    round = group.round(1, 1)
    received = [group.receive(round, rank) for rank in (1, 2, 3)]
    group.members[0].send(round, 1, TENSORS.items(), torch.bfloat16)
    got = received[0].result(timeout=20)
    assert got["counts"].dtype == torch.int64
    assert torch.equal(got["4"], TENSORS["4"].to(torch.bfloat16))


def test_who_does_not_join_is_named_and_those_left_form_a_new_group(group: Group) -> None:
    round = group.round(1, 1, deadline_s=1.0)
    waiting = [group.receive(replace(round, deadline_s=20.0), rank) for rank in (1, 2)]
    found = causes(group.send(round), *waiting)
    assert found[0] == "sampler1 (rank 3) joined not within 1 s"
    assert found[1:] == [f"the trainer: {found[0]}"] * 2
    left = replace(group.round(2, 2), names=NAMES[:2])
    received = [group.receive(left, rank) for rank in (1, 2)]
    group.send(left).result(timeout=20)
    assert all(call.result(timeout=20).keys() == TENSORS.keys() for call in received)


def test_an_error_of_one_is_the_cause_of_all(group: Group) -> None:
    def full(named: Named) -> None:
        raise ValueError("no room on the host")

    round = group.round(1, 1)
    calls = [group.receive(round, 1), group.receive(round, 2), group.receive(round, 3, full)]
    assert set(causes(group.send(round), *calls[:2])) == {"sampler1 (rank 3): no room on the host"}

    def torn() -> Iterator[tuple[str, Tensor]]:
        yield "0", TENSORS["0"]
        raise ValueError("a rank of the trainer has failed")

    round = group.round(2, 2)
    calls = [group.receive(round, rank) for rank in (1, 2, 3)]
    sent = group.send(round, torn())
    found = causes(*calls, sent)
    assert set(found[:3]) == {"the trainer: a rank of the trainer has failed"}

    round = replace(group.round(3, 3), version=7)
    calls = [group.receive(round, rank) for rank in (1, 2, 3)]
    sent = group.pool.submit(group.members[0].send, round, 8, TENSORS.items())
    assert causes(sent, *calls)[0] == "the round is of version 7, not 8"


def test_a_chunk_that_arrives_with_other_bytes_ends_the_round(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = weight_broadcast._gloo

    def early(channel: weight_broadcast.Channel) -> weight_broadcast.Communicator:
        communicator = intact(channel)
        if channel.rank != 2:
            return communicator

        def start(data: Tensor) -> Callable[[], bool]:  # says that it is done before it is
            communicator.start(data.clone())
            return lambda: True

        return communicator._replace(start=start)

    monkeypatch.setattr(weight_broadcast, "_gloo", early)
    round = group.round(1, 1)
    calls = [group.receive(round, rank) for rank in (1, 2, 3)]
    found = causes(group.send(round), *calls)
    assert found[2] == "chunk 0 did not arrive as it was sent"


def test_the_controllers_cause_ends_a_round_in_which_one_hangs(group: Group) -> None:
    round = group.round(1, 1)
    calls = [group.receive(round, 1), group.receive(round, 2)]
    hanging = group.receive(round, 3, lambda named: time.sleep(2.0))
    sent = group.send(round)
    time.sleep(0.3)
    started = time.monotonic()
    end_round(PrefixStore("round1", group.store), "sampler1: its process died")
    assert set(causes(sent, *calls)) == {"sampler1: its process died"}
    assert time.monotonic() - started < 15.0, "long before the deadline, also on a busy machine"
    causes(hanging)


KILLED = """
import os, sys
from engine.rollout.vllm.weight_broadcast import Member
from engine.weight_transfer import BroadcastRound
names = ("sampler0", "sampler1", "sampler1")
round = BroadcastRound("127.0.0.1", int(sys.argv[1]), 1, 1, names, 0, "gloo", 1, 20.0)
Member().receive(round, 3, lambda named: os._exit(9))
"""


def test_a_process_that_dies_between_two_chunks_ends_the_round(group: Group) -> None:
    round = group.round(1, 1)
    calls = [group.receive(round, 1), group.receive(round, 2)]
    sent = group.send(round)
    command = [sys.executable, "-c", KILLED, str(group.store.port)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9
    started = time.monotonic()
    ended: list[Future[Any]] = [sent, *calls]
    assert all(isinstance(call.exception(timeout=30), WeightSyncError) for call in ended)
    assert time.monotonic() - started < 15.0
    round = replace(group.round(2, 2), names=NAMES[:2])
    calls = [group.receive(round, rank) for rank in (1, 2)]
    group.send(round).result(timeout=20)
    assert all(call.result(timeout=20) for call in calls)


FORMING = """
import sys
from engine.errors import WeightSyncError
from engine.rollout.vllm.weight_broadcast import Member
from engine.weight_transfer import BroadcastRound
names = ("sampler0", "sampler1", "sampler1")
round = BroadcastRound("127.0.0.1", int(sys.argv[1]), 1, 1, names, 0, "gloo", 1, 60.0)
try:
    Member().receive(round, 1, list)
except WeightSyncError as error:
    print(error, end="")
"""


def test_a_process_ends_cleanly_after_a_round_that_ended_while_its_group_formed(
    group: Group,
) -> None:
    store = PrefixStore("round1", group.store)
    store.set("joined0", "")
    command = [sys.executable, "-c", FORMING, str(group.store.port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        store.wait(["0/1"])  # its address, for the others
        end_round(store, "sampler1: its process died")
        out, err = process.communicate(timeout=30)  # not the 60 s of the round
    assert (process.returncode, out, err) == (0, "sampler1: its process died", "")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {}),
        pytest.param("llama", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"in_process": False}, marks=pytest.mark.slow),
    ],
)
def test_vllm_decodes_on_and_then_serves_what_the_existing_path_loads(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcast, "CHUNK_BYTES", 1 << 16)
    store, trained, tp = (
        TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
        build(family),
        options.get("tensor_parallel_size", 1),
    )
    engine = VllmEngine(build(family), max_num_seqs=8, kv_cache_memory_mb=64, **options)
    params, prompts, sender = SamplingParams(n=2, max_new_tokens=8), make_prompts(3), Member()

    def parameters() -> dict[str, Tensor]:
        in_process = tp == 1 and "in_process" not in options
        return {n: t.clone() for n, t in engine.parameters().items()} if in_process else {}

    try:
        for number in (1, 2):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            names = ("sampler0",) * tp
            round = BroadcastRound(
                "127.0.0.1", store.port, number, 1, names, 0, "gloo", number, 60.0
            )
            before, old = engine.generate(prompts, params), parameters()
            engine.receive_weights(replace(round, rank=1))
            with torch.no_grad():
                sender.send(round, number, merged_weights(trained))
            assert engine.generate(prompts, params) == before, "as long as it has not loaded them"
            assert all(torch.equal(bits(old[n]), bits(t)) for n, t in parameters().items())
            engine.load_received(number)
            assert engine.policy_version == number
            broadcast, got = engine.generate(prompts, params), parameters()
            engine.update_weights(trained, number)
            assert broadcast == engine.generate(prompts, params)
            assert broadcast != before
            assert all(torch.equal(bits(got[n]), bits(t)) for n, t in parameters().items())
        # What lacks a part is not served.
        part = [(n, t) for n, t in merged_weights(trained) if "layers.1" not in n]
        engine.receive_weights(replace(round, number=3, rank=1))
        sender.send(replace(round, number=3), round.version, part)
        with pytest.raises(RolloutError, match="the update lacks"):
            engine.load_received(3)
        with pytest.raises(RolloutError, match="can't serve"):
            engine.generate(prompts, params)
    finally:
        sender.close()
        engine.close()
