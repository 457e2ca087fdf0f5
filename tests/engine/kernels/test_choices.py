"""The choice between compiled loops and the library, and AMX's tiles where there are none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine import kernels
from engine.errors import ConfigError
from engine.kernels import attention, choices, training_ops
from engine.kernels.choices import Choice, all_compiled, choose, known_choices
from engine.kernels.decoder_layer import gated_mlp, linears

needs_loops = pytest.mark.skipif(training_ops.library() is None, reason="no AVX512-BF16 or no cc")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Measure as on a new machine, and forget it afterwards."""
    monkeypatch.delenv(choices.VARIABLE, raising=False)
    monkeypatch.setattr(choices, "_file", lambda: tmp_path / "cache" / "choices.jsonl")
    choices._known.cache_clear()
    yield tmp_path / "cache" / "choices.jsonl"
    choices._known.cache_clear()


class Timed:
    """A kernel whose two implementations take as long as they are told."""

    def __init__(self, compiled_s: float, library_s: float) -> None:
        self.seconds, self.runs = {True: compiled_s, False: library_s}, 0

    def __call__(self, compiled: bool, rows: int) -> None:
        self.runs += 1
        time.sleep(self.seconds[compiled])


def test_the_faster_one_is_chosen_once_for_all_processes(own_folder: Path) -> None:
    slow_loops, slow_library = Timed(0.02, 0.001), Timed(0.001, 0.02)
    assert not choose("a", 100, (8, 8), slow_loops).is_compiled
    assert choose("b", 100, (8, 8), slow_library).is_compiled
    runs = slow_loops.runs
    assert not choose("a", 128, (8, 8), slow_loops).is_compiled, "the same power of two"
    choices._known.cache_clear()  # as another process begins
    assert not choose("a", 100, (8, 8), slow_loops).is_compiled
    assert slow_loops.runs == runs
    assert [choice.kernel for choice in known_choices()] == ["a", "b"]
    choose("a", 129, (8, 8), slow_loops)
    assert slow_loops.runs > runs


def test_near_ties_stay_compiled() -> None:
    assert Choice("a", (16,), 1, 1.0, 0.95).is_compiled
    assert not Choice("a", (16,), 1, 1.0, 0.85).is_compiled
    lost, won = Choice("a", (16,), 1, 0.4, 0.3), Choice("b", (16,), 1, 1.0, 2.0)
    assert all_compiled([lost, won])
    assert not all_compiled([lost, lost])


def test_of_two_processes_the_first_one_decides(own_folder: Path) -> None:
    def measured_meanwhile(compiled: bool, rows: int) -> None:
        choices._write(Choice("a", (16, 8), torch.get_num_threads(), 2.0, 1.0))
        time.sleep(0.0 if compiled else 0.002)

    assert not choose("a", 3, (8,), measured_meanwhile).is_compiled


def test_a_line_that_was_cut_off_is_measured_again(own_folder: Path) -> None:
    choose("a", 16, (8,), Timed(0.001, 0.005))
    text = own_folder.read_text()
    own_folder.write_text(text[:20] + "\n" + '{"kernel": "a", "shape": 3}' + "\n")
    choices._known.cache_clear()
    timed = Timed(0.001, 0.005)
    assert choose("a", 16, (8,), timed).is_compiled
    assert timed.runs
    assert json.loads(own_folder.read_text().splitlines()[-1])["kernel"] == "a"


def test_a_folder_that_cannot_be_written_loses_nothing(own_folder: Path) -> None:
    own_folder.parent.write_text("a file in the folder's place")
    timed = Timed(0.001, 0.005)
    assert choose("a", 16, (8,), timed).is_compiled
    runs = timed.runs
    assert choose("a", 16, (8,), timed).is_compiled
    assert timed.runs == runs


def test_the_variable_forces_one_and_refuses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(0.0, 0.0)
    for name in choices.IMPLEMENTATIONS:
        monkeypatch.setenv(choices.VARIABLE, name)
        assert choose("a", 16, (8,), timed).is_compiled == (name == "compiled")
    assert not timed.runs
    monkeypatch.setenv(choices.VARIABLE, "fast")
    with pytest.raises(
        ConfigError, match="HYBRIDFLYTE_KERNELS is 'fast'; set it to one of compiled"
    ):
        choose("a", 16, (8,), timed)


def test_instructions_are_measured_unless_they_are_forced(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, names = Timed(0.005, 0.001), ("AVX512-BF16", "FMA")
    for forced in choices.IMPLEMENTATIONS:
        monkeypatch.setenv(choices.VARIABLE, forced)
        assert choose("mlp", 16, (8,), timed, names, measured=True).name == "FMA"
        assert choose("mlp", 16, (8,), timed, names).name == "AVX512-BF16"
    assert str(known_choices()[0]).endswith("→ FMA")
    choose("mlp", 16, (8,), timed)  # of other names: another choice
    for name in ("AVX512-BF16", "FMA"):
        monkeypatch.setenv(choices.VARIABLE, name)
        assert training_ops.fastest_products.__wrapped__() == name
        assert choose("mlp", 16, (8,), timed).is_compiled


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out.float() * weight).sum(), inputs)]


@needs_loops
def test_each_choice_computes_the_same() -> None:
    torch.manual_seed(0)
    x, gate, up = (torch.randn(n, 48).mul(0.5).bfloat16().requires_grad_() for n in (40, 96, 96))
    down = torch.randn(48, 96).mul(0.5).bfloat16().requires_grad_()
    results = {}
    for name in choices.IMPLEMENTATIONS:
        with choices.force(name):
            mlp = gradients(gated_mlp(x, gate, up, down), x, gate, up, down)
            outs = linears(x, [(gate, None), (up, None)])
            results[name] = [*mlp, *gradients(torch.cat(outs, 1), x, gate, up)]
    for compiled, library in zip(*results.values(), strict=True):
        distance = (compiled.float() - library.float()).norm() / library.float().norm()
        assert distance < 0.02, float(distance)


@needs_loops
def test_a_layer_of_one_shape_is_measured_once(own_folder: Path) -> None:
    gate = torch.randn(64, 32).bfloat16()
    x = torch.randn(20, 32).bfloat16()
    first = training_ops.choose_mlp(x, gate, gate, gate.t().contiguous())
    assert first is not None
    assert (first.kernel, first.shape[1:]) == ("mlp", (32, 64))
    assert training_ops.choose_mlp(x, gate, gate, gate.t().contiguous()) is first
    assert len(own_folder.read_text().splitlines()) == 1


@pytest.fixture(scope="module")
def variants() -> dict[str, object]:
    """The compiled loops by what multiplies; AMX's instructions are written out in C."""
    header = Path(__file__).with_name("emulated_tiles.h")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels._INSTRUCTION_FLAGS, "AMX", ["-DTILES", "-include", str(header)])
        return {name: training_ops._load.__wrapped__(name) for name in kernels._INSTRUCTION_FLAGS}


def _all_products(draw: torch.Generator, rows: int, hidden: int, inner: int) -> list[Tensor]:
    """Outputs and gradients of an MLP, of linear layers, and of attention."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).mul_(0.5).bfloat16()

    x, gate, up = random(rows, hidden), random(inner, hidden), random(inner, hidden)
    down = random(hidden, inner)
    out, gated, raised = training_ops.mlp(x, gate, up, down, keep=True)
    assert gated is not None
    assert raised is not None
    grads = training_ops.mlp_gradients(
        [gate, up, down], x, [gated, raised], out, to_x=True, to_weights=True
    )
    outs = training_ops.linears(x, [gate, up], [None, random(inner)])
    grad_x, grad_parts = training_ops.linear_gradients(
        x, [gate, up], outs, to_x=True, to_weights=[True, True], to_biases=[False, True]
    )
    q, k, v = (random(1, heads, rows, 32) for heads in (4, 2, 2))
    runs = ((0, 0, 0, rows // 3), (0, rows // 3, rows // 3, rows))
    attended, softmax = attention.attention_forward(q, k, v, runs, 0.2)
    grad_heads = attention.attention_gradients([q, k, v], softmax, attended.contiguous(), runs, 0.2)
    results = [out, gated, raised, *grads, *outs, grad_x, *grad_parts, attended, *grad_heads]
    return [each for each in results if each is not None]


@needs_loops
@given(
    rows=st.integers(3, 230),
    hidden=st.integers(1, 9).map(lambda n: 16 * n),
    inner=st.integers(1, 14).map(lambda n: 16 * n),
    threads=st.integers(1, 2),
)
def test_all_instructions_compute_the_same(
    variants: dict[str, object], rows: int, hidden: int, inner: int, threads: int
) -> None:
    before, results = torch.get_num_threads(), {}
    torch.set_num_threads(threads)
    try:
        for name, functions in variants.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(training_ops, "library", lambda functions=functions: functions)
                patch.setattr(attention, "library", lambda functions=functions: functions)
                draw = torch.Generator().manual_seed(rows)
                results[name] = _all_products(draw, rows, hidden, inner)
    finally:
        torch.set_num_threads(before)
    vectors = results.pop("AVX512-BF16")
    for name, others in results.items():
        for expected, result in zip(vectors, others, strict=True):
            distance = (result.float() - expected.float()).norm()
            limit = 0.01 * expected.float().norm() + 1e-6
            assert distance <= limit, (name, expected.shape, float(distance))
