"""Each rank reads what it keeps: the same bits as sharding a whole model, and no more memory."""

from __future__ import annotations

import importlib.util
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from family_models import CHANGES
from gloo_ranks import run_ranks
from safetensors import safe_open
from thorough import and_slow
from tiny_engine import save_family, shared_prompts_batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from engine.config import LoRAConfig, ParallelConfig
from engine.models import (
    create_critic_model,
    load_model,
    load_policy_model,
    open_critic_model,
    open_model,
    open_policy_model,
)
from engine.models.forward import LogProbReader, ValueReader
from engine.models.policy import UnloadedModel
from engine.models.quantize import load_packed
from engine.parallel.layout import Layout
from engine.parallel.module_shards import local_tensor, named_tensors
from engine.parallel.process_groups import Ranks
from engine.runtime.sharded_model import ShardedModel
from engine.storage import weight_files

Sizes = dict[str, int]


class LiveBytes(TorchDispatchMode):
    """The most bytes of CPU tensors that operations under it had made at a time.

    Weight files that are mapped into memory before are not counted: their pages can be taken back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        self._mapped = [
            [int(end, 16) for end in line.split()[0].split("-")]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(".safetensors")
        ]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return out

    def _count(self, tensor: Any) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage._cdata in self._known:
            return
        if any(start <= storage.data_ptr() < end for start, end in self._mapped):
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size


def layouts(cases: list[Sizes]) -> Iterator[tuple[Ranks, ParallelConfig]]:
    for sizes in cases:
        config = ParallelConfig.model_validate(sizes)
        yield Ranks.form(Layout.of(config)), config


def alike(one: nn.Module, other: nn.Module, where: str) -> None:
    ours, theirs = named_tensors(one), named_tensors(other)
    assert list(ours) == list(theirs), where
    for name, tensor in theirs.items():
        mine = ours[name]
        assert mine.requires_grad == tensor.requires_grad
        assert torch.equal(local_tensor(mine), local_tensor(tensor)), f"{where}: {name}"
        assert isinstance(mine, DTensor) == isinstance(tensor, DTensor)
        if isinstance(mine, DTensor) and isinstance(tensor, DTensor):
            assert (mine.placements, mine.shape) == (tensor.placements, tensor.shape)
    buffers = zip(one.named_buffers(), other.named_buffers(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in buffers), where


def outputs(model: ShardedModel, reader: Any) -> dict[str, Tensor]:
    batch = shared_prompts_batch()
    return model.outputs(batch, model.micro_batches(batch, 64), reader)


LORA = LoRAConfig(rank=2)


def same_as_whole(folder: str, cases: list[Sizes], dtype: str, family: str) -> None:
    """A policy, a frozen one and a critic in each layout: loaded in shards, and whole."""
    torch.manual_seed(0)
    for ranks, config in layouts(cases):
        for name, opened, whole in (
            ("policy", open_model(folder, dtype), load_model(folder, dtype)),
            (
                "reference",
                open_model(folder, dtype).requires_grad_(False),
                load_model(folder, dtype).requires_grad_(False),
            ),
            (
                "critic",
                open_critic_model(folder, dtype),
                create_critic_model(load_model(folder, dtype)).eval(),
            ),
            (
                "policy with adapters",
                open_policy_model(folder, dtype, LORA, seed=3),
                load_policy_model(folder, dtype, LORA, seed=3),
            ),
            (
                "critic with adapters",
                open_critic_model(folder, dtype, LORA, seed=3),
                create_critic_model(load_model(folder, dtype), LORA, seed=3).eval(),
            ),
        ):
            # GPT-NeoX's files have other names than its parameters: it is loaded whole.
            assert isinstance(opened, UnloadedModel) or family == "gpt_neox"
            ours = ShardedModel(opened, ranks, config)
            theirs = ShardedModel(whole, ranks, config)
            alike(ours.module, theirs.module, f"{name} {config}")
            reader = (
                ValueReader()
                if name.startswith("critic")
                else LogProbReader(1.0, statistics=ours.statistics())
            )
            found, wanted = outputs(ours, reader), outputs(theirs, reader)
            assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


TWO: list[Sizes] = [{"dp": 2}, {"fsdp": 2}, {"tp": 2}, {"pp": 2}, {"sp": 2}]
FOUR: list[Sizes] = [
    {"fsdp": 2, "tp": 2},
    {"fsdp": 4, "offload_policy": True},
    {"pp": 2, "fsdp": 2, "activation_checkpointing": True},
    {"dp": 2, "fsdp": 2},
    {"sp": 2, "tp": 2},
    {"pp": 2, "tp": 2},
]
TP_PP: list[Sizes] = [{"tp": 2}, {"pp": 2}]


@pytest.mark.parametrize(
    ("cases", "family", "dtype"),
    and_slow(
        [(TWO, "qwen2", "float32")],
        [
            (FOUR, "llama", "bfloat16"),
            (TWO, "llama", "bfloat16"),
            (FOUR, "qwen2", "float32"),
            *((TP_PP, family, "float32") for family in CHANGES),
        ],
    ),
)
def test_every_layout_has_the_bits_of_a_model_loaded_whole(
    tmp_path: Path, cases: list[Sizes], family: str, dtype: str
) -> None:
    folder = str(save_family(family, tmp_path))
    sizes = {name: size for name, size in cases[0].items() if not isinstance(size, bool)}
    run_ranks(Layout(**sizes).world_size, same_as_whole, folder, cases, dtype, family)


BUCKET = 64 << 10
LAYER = 4 * (4 * 128 * 128 + 3 * 128 * 256)  # bytes, of the model below
ADAPTERS = 4 * 4 * 2 * (4 * 2 * 128 + 3 * (128 + 256))  # of rank 2


def peaks(folder: str, cases: list[Sizes], lora: LoRAConfig | None = None) -> list[tuple[int, int]]:
    """The most bytes of tensors while each layout is loaded, and those that stay."""
    found = []
    for ranks, config in layouts(cases):
        source = open_policy_model(folder, "float32", lora)
        with patch.object(weight_files, "BUCKET_BYTES", BUCKET), LiveBytes() as live:
            model = ShardedModel(source, ranks, config)
        tensors = map(local_tensor, named_tensors(model.module).values())
        found.append((live.peak, sum({t.data_ptr(): t.nbytes for t in tensors}.values())))
    return found


@pytest.mark.parametrize(
    ("lora", "cases"),
    and_slow(
        [
            (None, [{"tp": 4}, {"dp": 2, "fsdp": 2}]),
            (LORA, [{"fsdp": 2, "tp": 2}, {"pp": 4}]),
        ],
        [
            (None, [{"fsdp": 4}, {"fsdp": 2, "tp": 2}, {"fsdp": 2, "sp": 2}, {"pp": 4}, {"dp": 4}]),
            (LORA, [{"fsdp": 4}, {"tp": 4}, {"fsdp": 2, "sp": 2}, {"dp": 2, "fsdp": 2}, {"dp": 4}]),
        ],
    ),
)
def test_a_rank_s_memory_is_its_shards_and_a_bucket(
    tmp_path: Path, lora: LoRAConfig | None, cases: list[Sizes]
) -> None:
    shape = Qwen2Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(shape).save_pretrained(tmp_path, max_shard_size="2MB")
    size = total_bytes(tmp_path)
    for rank in run_ranks(4, peaks, str(tmp_path), cases, lora):
        for case, (peak, kept) in zip(cases, rank, strict=True):
            copies, stages = case.get("dp", 1), case.get("pp", 1)
            assert kept < 1.1 * size * copies / 4 or stages > 1, case
            # A model in one piece, or a stage, tries its first layer both ways when loaded.
            tried = LAYER if case.get("fsdp", 1) * case.get("tp", 1) == 1 else 0
            drawn = ADAPTERS if lora else 0  # each rank has all of them until it has loaded
            assert peak <= kept + 2 * BUCKET + tried + drawn, case  # and small change
            assert peak < 0.7 * size or copies > 2, case


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
def test_a_quantised_base_is_packed_a_matrix_at_a_time(
    tmp_path: Path, kind: str, family: str
) -> None:
    """Its bits are those of a base that was loaded whole."""
    folder = save_family(family, tmp_path)
    lora = LoRAConfig.model_validate({"rank": 2, "quantize": kind})
    wanted = load_policy_model(folder, "float32", lora)
    found = open_policy_model(folder, "float32", lora)
    assert isinstance(found, PreTrainedModel)
    expected = wanted.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert {n for n, p in found.named_parameters() if p.requires_grad} == {
        n for n, p in wanted.named_parameters() if p.requires_grad
    }
    assert found.training == wanted.training


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")
def test_no_rank_has_a_quantised_base_dense(tmp_path: Path) -> None:
    shape = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = Qwen2ForCausalLM(shape)
    model.save_pretrained(tmp_path)
    dense = sum(p.nbytes for p in model.parameters())
    matrix = max(p.nbytes for p in model.parameters())
    for _ in range(2):  # the first time the library makes its tables
        opened = open_model(tmp_path)
        assert isinstance(opened, UnloadedModel)
        with LiveBytes() as live:
            found = load_packed(opened.module, opened.files, opened.names, "nf4")
    kept = sum({t.data_ptr(): t.nbytes for t in found.state_dict().values()}.values())
    assert kept < 0.3 * dense
    assert live.peak <= kept + 4 * matrix


def total_bytes(folder: Path) -> int:
    found = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    return found


def said(folder: str) -> list[str]:
    """What a rank logs of a model that can't be read in slices."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("engine.models.policy").addHandler(handler)
    ranks = Ranks.form(Layout(fsdp=2))
    model = ShardedModel(open_model(folder), ranks, ParallelConfig(fsdp=2))
    assert all(isinstance(p, DTensor) for p in model.module.parameters())
    return records


def test_a_model_that_ranks_load_whole_is_said_once(tmp_path: Path) -> None:
    folder = save_family("qwen2", tmp_path)
    weights = load_model(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    first, second = run_ranks(2, said, str(folder))
    assert second == []
    [message] = first
    assert "each rank loads all of" in message
    assert "not in safetensors" in message


def written(folder: str, out: str, sizes: Sizes, lora: LoRAConfig | None) -> None:
    """A policy's folder; of one with adapters, B is no longer zeros."""
    from engine.runtime.policy_runtime import PolicyRuntime, StartModel, save_ranks

    config = ParallelConfig.model_validate(sizes)
    start = StartModel(folder, "bfloat16", lora)
    policy = PolicyRuntime(start.open(), Ranks.form(Layout.of(config)), config)
    assert policy.loaded_in_shards
    for name, parameter in policy.module.named_parameters():
        if ".lora_B" in name:
            local_tensor(parameter.data).fill_(0.25)
    with patch.object(weight_files, "FILE_BYTES", 4000):
        save_ranks(policy, start, Path(out))


def others_and_weights(folder: Path) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    others = {
        str(p.relative_to(folder)): p.read_bytes()
        for p in files
        if not p.name.startswith("model") and p.suffix != ".safetensors"
    }
    weights: dict[str, Tensor] = {}
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return others, weights


@pytest.mark.parametrize("lora", [None, LORA])
def test_rank_zero_writes_the_folder_that_one_rank_writes(
    tiny_folder: Path, tmp_path: Path, lora: LoRAConfig | None
) -> None:
    one = tmp_path / "one"
    run_ranks(1, written, str(tiny_folder), str(one), {}, lora)
    for sizes in [{"pp": 2}] if lora is None else [{"fsdp": 2}, {"tp": 2}]:
        two = tmp_path / "-".join(sizes)
        run_ranks(2, written, str(tiny_folder), str(two), sizes, lora)
        assert len(list(two.glob("model-*-of-*.safetensors"))) > 3
        (others, weights), (ours, found) = others_and_weights(one), others_and_weights(two)
        assert ours == others
        assert sorted(found) == sorted(weights)
        for name, tensor in weights.items():
            assert found[name].dtype == tensor.dtype
            torch.testing.assert_close(found[name], tensor)
    base = load_model(tiny_folder, "bfloat16").state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(base[name], load_model(two, "bfloat16").state_dict()[name]) == (not lora)
