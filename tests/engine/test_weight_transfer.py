"""Weights sent to samplers, whole and as deltas."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from thorough import and_slow
from tiny_engine import training_batch, write_tiny_folder
from torch import Tensor

from engine import weight_transfer
from engine.batch import Batch
from engine.config import ActorConfig, LoRAConfig, RolloutConfig
from engine.controller.worker_host import shard_rows
from engine.errors import WeightSyncError, WorkerError
from engine.models import adapter_parameters, load_model
from engine.parallel.layout import Layout
from engine.weight_transfer import DeltaChunk, WeightReceiver, WeightSender
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext
from engine.workers.rollout_worker import RolloutWorker

Tensors = dict[str, Tensor]


def weights(seed: int = 0) -> Tensors:
    """Tensors of mixed dtypes and odd sizes, so that some start off their alignment."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "b.weight": torch.randn(33, 7, generator=draw),
        "a.norm": torch.rand(5, generator=draw).bfloat16(),
        "c.flags": torch.rand(3, generator=draw) < 0.5,
        "d.none": torch.empty(0, 4),
        "e.count": torch.tensor(seed),
        "f.weight": torch.randn(1001, generator=draw).bfloat16(),
    }


def moved(tensors: Tensors, seed: int) -> Tensors:
    """As an update leaves them: most numbers of one tensor moved, a few of the others."""
    draw = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    new["b.weight"] += 1e-4 * torch.randn(33, 7, generator=draw)
    new["f.weight"][torch.rand(1001, generator=draw) < 0.03] *= 1.01
    new["a.norm"][int(seed) % 5] = -0.0
    new["e.count"] += 1
    return new


def same(found: Tensors, wanted: Tensors) -> bool:
    return all(
        torch.equal(weight_transfer.integer_view(found[name]), weight_transfer.integer_view(tensor))
        for name, tensor in wanted.items()
    )


class Sender:
    """An actor's side: a policy that moves, and what it sends."""

    def __init__(self, tensors: Tensors | None = None, version: int = 0) -> None:
        self.tensors, self.version = tensors or weights(), version
        self.sender = WeightSender(deltas=True)

    def step(self) -> tuple[Batch, Batch]:
        self.version += 1
        self.tensors = moved(self.tensors, self.version)
        return self.publish()

    def publish(self) -> tuple[Batch, Batch]:
        return self.sender.send(self.tensors.items(), self.version), self.sender.delta()


class Receiver:
    """A rollout process's side."""

    def __init__(self) -> None:
        self.tensors, self.receiver = weights(seed=99), WeightReceiver()

    def load(self, sent: Batch) -> int:
        return self.receiver.load(self.tensors, sent)


@pytest.fixture
def pair() -> tuple[Sender, Receiver]:
    """A sender and a receiver that has its version 1."""
    sender, receiver = Sender(), Receiver()
    whole, _ = sender.step()
    assert receiver.load(whole) == 1
    return sender, receiver


@pytest.mark.usefixtures("one_thread")
def test_deltas_bring_what_the_whole_does(pair: tuple[Sender, Receiver]) -> None:
    sender, receiver = pair
    for version in range(2, 6):
        whole, changes = sender.step()
        assert receiver.load(changes) == version
        receiver.receiver.check()
        assert same(receiver.tensors, sender.tensors)
        fresh = Receiver()
        assert fresh.load(whole) == version
        assert same(fresh.tensors, sender.tensors)
    whole, unchanged = sender.publish()
    assert receiver.load(unchanged) == 5
    assert unchanged["delta"].numel() == 8, "nothing has changed"


@pytest.mark.usefixtures("one_thread")
def test_the_whole_is_not_touched_by_what_is_sent_later(pair: tuple[Sender, Receiver]) -> None:
    sender, _ = pair
    first, _ = sender.step()
    then = {name: tensor.clone() for name, tensor in sender.tensors.items()}
    for tensor in sender.tensors.values():
        tensor.fill_(1)
    sender.step()
    late = Receiver()
    late.load(first)
    assert same(late.tensors, then)


@pytest.mark.usefixtures("one_thread")
def test_without_deltas_nothing_is_kept_and_none_is_given() -> None:
    sender, receiver = WeightSender(), Receiver()
    for version in (1, 2):
        sent = sender.send(weights(version).items(), version)
        assert set(sent.names) == {"weights", "policy_version"}
        assert receiver.load(sent) == version
        assert same(receiver.tensors, weights(version))
    assert sender._last is None
    with pytest.raises(WeightSyncError, match="no weights that it sent before"):
        receiver.load(sender.delta())


def flipped(sent: Batch, field: str, at: int) -> Batch:
    """A batch one of whose bits is the other way round."""
    broken = sent[field].clone()
    row = broken.view(-1).view(torch.uint8)
    row[at % row.numel()] ^= 1 << (at % 8)
    return sent | {field: broken}


def assert_repaired(receiver: Receiver, sender: Sender) -> None:
    """It samples nothing; a whole sync brings the right weights, and deltas continue from there."""
    with pytest.raises(WeightSyncError, match="samples nothing until it receives the full weights"):
        receiver.receiver.check()
    whole, changes = sender.step()
    with pytest.raises(WeightSyncError):
        receiver.load(changes)
    assert receiver.load(whole) == sender.version
    receiver.receiver.check()
    assert same(receiver.tensors, sender.tensors)
    _, changes = sender.step()
    assert receiver.load(changes) == sender.version
    assert same(receiver.tensors, sender.tensors)


FIELDS = ("delta", "policy_version", "digest", "base_version", "base_digest", "checksum")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("at", [0, 9, 60, 1001])
def test_one_flipped_bit_of_a_delta(pair: tuple[Sender, Receiver], field: str, at: int) -> None:
    sender, receiver = pair
    before = copy.deepcopy(receiver.tensors)
    _, changes = sender.step()
    with pytest.raises(WeightSyncError, match="damaged on its way"):
        receiver.load(flipped(changes, field, at))
    assert same(receiver.tensors, before), "a damaged delta is never written"
    assert_repaired(receiver, sender)


@pytest.mark.usefixtures("one_thread")
def test_a_dropped_delta(pair: tuple[Sender, Receiver]) -> None:
    sender, receiver = pair
    sender.step()
    _, later = sender.step()
    with pytest.raises(WeightSyncError, match=r"weights of version 2, this process has .* 1: one"):
        receiver.load(later)
    assert_repaired(receiver, sender)


@pytest.mark.usefixtures("one_thread")
def test_deltas_in_the_wrong_order_and_twice(pair: tuple[Sender, Receiver]) -> None:
    sender, receiver = pair
    (_, first), (_, second) = sender.step(), sender.step()
    with pytest.raises(WeightSyncError, match="one was missed"):
        receiver.load(second)
    with pytest.raises(WeightSyncError, match="this process has none"):
        receiver.load(first)  # its turn is over
    assert_repaired(receiver, sender)
    _, again = sender.step()
    receiver.load(again)
    with pytest.raises(WeightSyncError, match="one was missed"):
        receiver.load(again)
    assert_repaired(receiver, sender)


@pytest.mark.usefixtures("one_thread")
def test_a_receiver_that_starts_anew(pair: tuple[Sender, Receiver]) -> None:
    sender, _ = pair
    _, changes = sender.step()
    joining = Receiver()
    joining.receiver.check()  # it has its model folder's weights, and was sent nothing yet
    with pytest.raises(WeightSyncError, match="this process has none"):
        joining.load(changes)
    assert_repaired(joining, sender)


@pytest.mark.usefixtures("one_thread")
def test_a_sender_that_starts_anew(pair: tuple[Sender, Receiver]) -> None:
    """From a checkpoint of version 1 it comes to another version 2 than the one before it."""
    sender, receiver = pair
    start = copy.deepcopy(sender.tensors)
    _, changes = sender.step()
    receiver.load(changes)
    restarted = Sender(start, version=1)
    _, nothing = restarted.publish()
    with pytest.raises(WeightSyncError, match="it was restarted"):
        receiver.load(nothing)
    receiver.load(sender.publish()[0])
    restarted.tensors["b.weight"] += 1.0
    restarted.step()
    assert restarted.version == 2
    _, other = restarted.step()
    with pytest.raises(WeightSyncError, match="came from another sender"):
        receiver.load(other)
    assert_repaired(receiver, restarted)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["a.norm", "b.weight", "e.count", "f.weight"])
def test_weights_that_were_changed_here(pair: tuple[Sender, Receiver], name: str) -> None:
    sender, receiver = pair
    weight_transfer.integer_view(receiver.tensors[name])[0] ^= 1
    _, changes = sender.step()
    with pytest.raises(WeightSyncError, match="are not the actor's of version 2"):
        receiver.load(changes)
    assert_repaired(receiver, sender)


@pytest.mark.usefixtures("one_thread")
def test_a_load_that_ends_midway(
    pair: tuple[Sender, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair
    _, changes = sender.step()
    real, calls = weight_transfer._apply_chunk, [0]

    def failing(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError("out of memory")
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(weight_transfer, "_apply_chunk", failing)
        with pytest.raises(MemoryError):
            receiver.load(changes)
    assert_repaired(receiver, sender)


@pytest.mark.usefixtures("one_thread")
def test_damaged_or_foreign_whole_weights(pair: tuple[Sender, Receiver]) -> None:
    sender, receiver = pair
    before = copy.deepcopy(receiver.tensors)
    whole, _ = sender.step()
    with pytest.raises(WeightSyncError, match="damaged on their way"):
        receiver.load(flipped(whole, "weights", 77))
    assert same(receiver.tensors, before)
    receiver.tensors["b.weight"] = receiver.tensors["b.weight"].view(7, 33)
    with pytest.raises(WeightSyncError, match="another model of the same size"):
        receiver.load(whole)
    receiver.tensors["b.weight"] = torch.zeros(33, 8)
    with pytest.raises(WorkerError, match="same model folder, dtype and adapters"):
        receiver.load(whole)
    receiver.tensors["b.weight"] = torch.zeros(8, 33).t()[:, :7]  # a view with gaps
    assert receiver.load(whole) == 2
    _, changes = sender.step()
    assert receiver.load(changes) == 3
    assert same(
        {**receiver.tensors, "b.weight": receiver.tensors["b.weight"].contiguous()}, sender.tensors
    )


@pytest.mark.usefixtures("one_thread")
def test_a_sender_refuses_another_model() -> None:
    sender = WeightSender()
    sender.send(weights().items(), 0)
    with pytest.raises(WorkerError, match=r"'b\.weight' was not among those sent before"):
        sender.send((weights() | {"b.weight": torch.zeros(2)}).items(), 1)
    with pytest.raises(WorkerError, match="'z' was not among those sent before"):
        sender.send((weights() | {"z": torch.zeros(2)}).items(), 1)
    with pytest.raises(WorkerError, match=r"lacks its tensors \['a.norm'"):
        sender.send([("b.weight", weights()["b.weight"])], 1)


EVENTS = ("step", "delta", "whole", "drop", "swap", "flip", "join", "restart", "poke")


@pytest.mark.usefixtures("one_thread")
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 10**6)), max_size=25))
def test_whatever_happens_weights_are_right_or_refused(events: list[tuple[str, int]]) -> None:
    sender, receiver = Sender(), Receiver()
    queue, past = [sender.publish()], {(0, id(sender.sender)): sender.tensors}
    receiver.load(queue[-1][0])
    told = sender.tensors

    def load(sent: Batch) -> None:
        nonlocal told
        try:
            version = receiver.load(sent)
        except WeightSyncError:
            with pytest.raises(WeightSyncError):
                receiver.receiver.check()
            return
        receiver.receiver.check()
        told = next(t for (v, _), t in past.items() if v == version and same(receiver.tensors, t))

    for event, number in events:
        match event:
            case "step":
                queue.append(sender.step())
                past[sender.version, id(sender.sender)] = sender.tensors
            case "delta":
                load(queue[-1][1])
            case "whole":
                load(queue[-1][0])
            case "drop":
                queue = queue[:-1] or queue
            case "swap":
                load(queue[number % len(queue)][1])
            case "flip" if "delta" in queue[-1][1]:
                load(flipped(queue[-1][1], "delta", number))
            case "join":
                receiver = Receiver()
                load(queue[-1][1])
            case "restart":
                sender = Sender(moved(sender.tensors, number), sender.version)
                queue.append(sender.publish())
                past[sender.version, id(sender.sender)] = sender.tensors
            case "poke":
                weight_transfer.integer_view(receiver.tensors["b.weight"])[number % 231] ^= 1
                load(sender.publish()[1])
    load(sender.step()[0] if sender.version < 0 else sender.publish()[0])
    assert same(receiver.tensors, sender.tensors)


def actor(
    folder: Path | str, context: WorkerContext | None = None, lora: int = 0, **options: Any
) -> ActorWorker:
    parallel = options.pop("parallel", {})
    values = {"use_kl_loss": False, "optim": {"lr": 1e-6, "warmup_ratio": 0.0}}
    return ActorWorker(
        context or WorkerContext("actor"),
        model_path=str(folder),
        config=ActorConfig.model_validate(values | {"parallel": parallel}),
        temperature=1.0,
        total_steps=100,
        seed=0,
        lora=LoRAConfig(rank=lora),
        delta_sync=True,
        **options,
    )


def sampler(folder: Path | str, dtype: str = "float32", lora: int = 0) -> RolloutWorker:
    return RolloutWorker(
        WorkerContext("sampler"),
        model_path=str(folder),
        config=RolloutConfig(n=2),
        max_response_length=6,
        max_model_len=40,
        seed=0,
        dtype=dtype,
        lora=LoRAConfig(rank=lora),
    )


def prompts() -> Batch:
    ids = [[5, 6, 7], [8, 9]]
    return Batch({"group_ids": torch.arange(2)}, {"prompt_ids": ids, "prompt": ["a", "b"]})


def policy(worker: RolloutWorker) -> Tensors:
    return dict(worker.context.process.policy.module.named_parameters())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sampler_follows_the_actor_by_deltas(tiny_folder: Path, dtype: str) -> None:
    trained, there = actor(tiny_folder, sampler_dtype=dtype), sampler(tiny_folder, dtype)
    there.load_weights(trained.weights())
    sizes = []
    for version in (1, 2, 3):
        trained.update(training_batch(9, seed=version))
        whole, changes = trained.weights(), trained.weights_delta()
        assert there.load_weights(changes) == version
        sizes.append(changes["delta"].numel() / whole["weights"].numel())
        wanted = {
            n: p.detach().to(getattr(torch, dtype))
            for n, p in trained.sharded.module.named_parameters()
        }
        assert same(policy(there), wanted)
    assert 0 < max(sizes) < {"float32": 0.6, "bfloat16": 0.1}[dtype]
    fresh = sampler(tiny_folder, dtype)
    fresh.load_weights(whole)
    assert torch.equal(
        there.generate(prompts())["responses"], fresh.generate(prompts())["responses"]
    )


@pytest.mark.usefixtures("one_thread")
def test_a_sampler_that_failed_to_follow_refuses_to_sample(tiny_folder: Path) -> None:
    trained, there = actor(tiny_folder), sampler(tiny_folder)
    there.load_weights(trained.weights())
    trained.update(training_batch(9))
    whole, changes = trained.weights(), trained.weights_delta()
    with pytest.raises(WeightSyncError, match="damaged"):
        there.load_weights(flipped(changes, "delta", 500))
    with pytest.raises(WeightSyncError, match="samples nothing until it receives the full weights"):
        there.generate(prompts())
    there.load_weights(whole)
    assert len(there.generate(prompts())) == 4


@pytest.mark.usefixtures("one_thread")
def test_an_actor_resumed_from_a_checkpoint_sends_the_whole_first(tiny_folder: Path) -> None:
    trained, there = actor(tiny_folder), sampler(tiny_folder)
    trained.update(training_batch(9))
    there.load_weights(trained.weights())
    saved = copy.deepcopy(trained.state_dict())
    trained.update(training_batch(9))
    trained.weights()
    there.load_weights(trained.weights_delta())
    resumed = actor(tiny_folder)
    resumed.load_state_dict(saved)
    resumed.update(training_batch(9, seed=7))  # another version 2
    whole = resumed.weights()
    with pytest.raises(WeightSyncError, match="was restarted"):
        there.load_weights(resumed.weights_delta())
    assert there.load_weights(whole) == 2
    assert same(policy(there), dict(resumed.sharded.module.named_parameters()))
    # The same process taken back: its snapshot is still what the sampler has.
    resumed.load_state_dict(saved)
    resumed.weights()
    assert there.load_weights(resumed.weights_delta()) == 1
    assert same(policy(there), dict(resumed.sharded.module.named_parameters()))


def followed(folder: str, parallel: dict[str, int], lora: int) -> bool:
    """On ranks: a sampler of the plain model follows a sharded actor by deltas."""
    rank = torch.distributed.get_rank()
    world = torch.distributed.get_world_size()
    layout = Layout(**parallel)
    context = WorkerContext("actor", rank, world, layout=layout)
    trained = actor(folder, context, lora=lora, parallel=parallel)
    first = trained.weights()
    there = sampler(folder, lora=lora) if rank == 0 else None
    if there:
        there.load_weights(first)
    for seed in (1, 2):
        trained.update(shard_rows(training_batch(8, seed=seed), layout.data_shard(rank))[0])
        trained.weights()
        if there:
            assert there.load_weights(trained.weights_delta()) == seed
    whole = {name: t.clone() for name, t in trained.sharded.full_tensors()}
    if there is None:
        return True
    found = adapter_parameters(there.context.process.policy.module) if lora else policy(there)
    return same(found, {name: whole[name] for name in found})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("parallel", "lora"),
    and_slow([({"fsdp": 2}, 0), ({"pp": 2}, 4)], [({"fsdp": 2}, 4), ({"pp": 2}, 0)]),
)
def test_a_spread_actor_sends_deltas_too(
    tmp_path: Path, parallel: dict[str, int], lora: int
) -> None:
    folder = str(write_tiny_folder(tmp_path / "start"))
    assert load_model(folder).config.tie_word_embeddings
    assert run_ranks(2, followed, folder, parallel, lora) == [True, True]


DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


POOL = ThreadPoolExecutor(2)


INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


HEADER = weight_transfer.pack([DeltaChunk(0, 0, 1, 1, np.empty(0, np.uint8))]).numel() - 8


def bits(tensor: Tensor) -> np.ndarray:
    return weight_transfer.integer_view(tensor).numpy()


def through(old: Tensor, new: Tensor) -> tuple[Tensor, list[DeltaChunk], int]:
    """`old` with the delta on it, as it came over the wire; the chunks, and their bytes."""
    sent = weight_transfer.pack(list(weight_transfer.encode(0, bits(old), bits(new), POOL)))
    chunks = list(weight_transfer.unpack(sent.clone()))
    target = old.clone()
    weight_transfer.apply_delta(chunks, [weight_transfer.integer_view(target)], POOL)
    return target, chunks, sent.numel()


@st.composite
def versions(draw: Any) -> tuple[Tensor, Tensor]:
    """Two versions of one tensor: any bits, of which few, most or all change by little or much."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.sampled_from([0, 1, 7, 8, 300, 3000]))
    seed = draw(st.integers(0, 2**32 - 1))
    share = draw(st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.97, 1.0]))
    steps = draw(st.sampled_from([1, 127, 128, 129, 32767, 32768, 2**31 - 1, 2**63 - 1]))
    some_far = draw(st.booleans())
    random = np.random.default_rng(seed)
    if dtype is torch.bool:
        old = torch.from_numpy(random.random(size) < 0.5)
        return old, old ^ torch.from_numpy(random.random(size) < share)
    kind = INTEGERS[dtype.itemsize]
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    was = random.integers(least, most, size, kind, endpoint=True)
    by = random.integers(max(-steps, least), min(steps, most), size, kind, endpoint=True)
    if some_far:
        far = random.random(size) < 0.01
        by[far] = random.integers(least, most, int(far.sum()), kind, endpoint=True)
    by[random.random(size) >= share] = 0
    with np.errstate(over="ignore"):
        now = was + by
    return torch.from_numpy(was).view(dtype), torch.from_numpy(now).view(dtype)


@given(versions())
def test_any_bits_come_out_as_they_went_in(pair: tuple[Tensor, Tensor]) -> None:
    old, new = pair
    found, chunks, size = through(old, new)
    assert np.array_equal(bits(found), bits(new))
    assert (not chunks) == np.array_equal(bits(old), bits(new))
    assert size <= 8 + HEADER * len(chunks) + new.nbytes, "never dearer than the tensor itself"


def test_special_numbers_keep_their_bits() -> None:
    quiet = torch.tensor([0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32)
    numbers = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45, 1.0, -1.0])
    values = torch.cat([quiet.view(torch.float32), numbers])
    for shift in range(1, len(values)):
        other = values.roll(shift)
        found, _, _ = through(values, other)
        assert np.array_equal(bits(found), bits(other))
    found, chunks, _ = through(torch.zeros(4), -torch.zeros(4))
    assert chunks
    assert np.signbit(found.numpy()).all()
    assert not through(quiet.view(torch.float32), quiet.view(torch.float32))[1], "a NaN is itself"


@pytest.mark.parametrize(
    ("share", "bytes_a_number"), [(0.002, 0.01), (0.05, 0.105), (0.4, 0.53), (1, 1.0)]
)
def test_few_and_small_changes_take_few_bytes(share: float, bytes_a_number: float) -> None:
    count = 100_000
    draw = torch.Generator().manual_seed(0)
    old = torch.randn(count, generator=draw).bfloat16()
    moved = torch.rand(count, generator=draw) < share
    new = (old.view(torch.int16) + moved.to(torch.int16)).view(torch.bfloat16)
    found, [_], size = through(old, new)
    assert torch.equal(found, new)
    assert size <= count * bytes_a_number + HEADER + 8


def test_unrelated_numbers_are_no_larger_than_they_are() -> None:
    old, new = torch.randn(5000), torch.randn(5000) * 1e9
    found, [_], size = through(old, new)
    assert torch.equal(found, new)
    assert size <= new.nbytes + HEADER + 8


def test_large_tensors_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "CHUNK", 64)
    old = torch.randn(1000)
    new = old.clone()
    new[[3, 63, 64, 200, 999]] *= 1.0001
    found, chunks, _ = through(old, new)
    assert torch.equal(found, new)
    assert [chunk.start for chunk in chunks] == [0, 64, 192, 960]
    assert chunks[-1].count == 1000 - 960


@pytest.mark.parametrize("cut", [0, 5, 8, 20, -1])
def test_a_delta_that_ends_too_early_or_late_is_refused(cut: int) -> None:
    old, new = torch.zeros(100), torch.ones(100)
    sent = weight_transfer.pack(list(weight_transfer.encode(0, bits(old), bits(new), POOL)))
    with pytest.raises(WeightSyncError, match="a delta of"):
        list(weight_transfer.unpack(sent[:cut]))
    with pytest.raises(WeightSyncError, match="a delta of"):
        list(weight_transfer.unpack(torch.cat([sent, sent[:1]])))


@pytest.mark.gpu
@given(versions())
def test_tensors_on_a_gpu_come_out_alike(pair: tuple[Tensor, Tensor]) -> None:
    old, new = pair
    chunks = list(weight_transfer.encode(0, bits(old), bits(new), POOL))
    target = old.cuda()
    weight_transfer.apply_delta(chunks, [weight_transfer.integer_view(target)], POOL)
    assert np.array_equal(bits(target.cpu()), bits(new))
