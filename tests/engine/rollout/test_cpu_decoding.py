"""The compiled decode step and draw."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import FAMILIES, VOCABULARY, build, make_prompts, reference_logits
from thorough import and_slow
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine import kernels
from engine.errors import DivergedRolloutError
from engine.kernels import choices, decoding_ops
from engine.kernels.decoding_ops import CpuStep, library
from engine.rollout.native import NativeEngine, llama_decoder
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.sampling import draw, noise_keys, sample, uniforms

compiled = pytest.mark.skipif(library() is None, reason="no AVX512-BF16, or no C compiler")


SAMPLED = SamplingParams(n=3, max_new_tokens=40, seed=3, stop_token_ids=tuple(range(20, 26)))


def ragged() -> nn.Module:
    """No size is a multiple of what a vector or a tile holds, but the head's."""
    state = torch.get_rng_state()
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY + 1,
        hidden_size=72,
        head_dim=96,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=101,
        max_position_embeddings=128,
        initializer_range=0.15,
        attention_bias=True,
    )
    model = Qwen3ForCausalLM(config)
    torch.set_rng_state(state)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{family: lambda family=family: build(family) for family in FAMILIES},
    "ragged": ragged,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each compiled step had."""
    rows: list[int] = []
    run = CpuStep.run

    def counted(self: CpuStep, tokens: Tensor, *rest: Any) -> Tensor:
        rows.append(len(tokens))
        return run(self, tokens, *rest)

    monkeypatch.setattr(CpuStep, "run", counted)
    return rows


@pytest.fixture(params=["AVX512-BF16", "FMA", "AMX"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What multiplies in the steps; AMX's instructions are written out in C."""
    header = Path(__file__).parents[1] / "kernels/emulated_tiles.h"
    monkeypatch.setitem(kernels._INSTRUCTION_FLAGS, "AMX", ["-DTILES", "-include", str(header)])
    monkeypatch.setattr(decoding_ops, "fastest_products", lambda: request.param)
    library.cache_clear()
    yield request.param
    library.cache_clear()


def errors(model: nn.Module, prompts: list[list[int]], done: list[Completion]) -> Tensor:
    """How far the log-probs are from those of `model`'s own forward."""
    found = []
    for c in done:
        expected = reference_logits(model, prompts[c.prompt_index], c.token_ids).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        found.append((torch.tensor(c.log_probs) - chosen).abs())
    return torch.cat(found)


@compiled
@pytest.mark.parametrize(
    ("name", "n"),
    and_slow(
        [("qwen2", 1), ("llama", 3), ("ragged", 1)],
        [("qwen2", 3), ("llama", 1), ("ragged", 3)]
        + [(name, n) for name in ("qwen3", "mistral") for n in (1, 3)],
    ),
)
def test_log_probs_are_as_near_to_the_trainers_as_pytorchs(
    name: str, n: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = MODELS[name]().bfloat16(), make_prompts(12)
    params = SamplingParams(n=n, max_new_tokens=40, seed=3, stop_token_ids=SAMPLED.stop_token_ids)
    found = errors(model, prompts, NativeEngine(model, max_num_seqs=8).generate(prompts, params))
    assert calls
    calls.clear()
    monkeypatch.setattr(llama_decoder, "cpu_step", lambda *_: None)
    plain = errors(model, prompts, NativeEngine(model, max_num_seqs=8).generate(prompts, params))
    assert not calls
    assert found.mean() < 1.2 * plain.mean()
    assert found.max() < 0.2


@compiled
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_the_trainers_forward(name: str, calls: list[int]) -> None:
    model, prompts = MODELS[name]().bfloat16(), make_prompts(6)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=30)
    same = total = 0
    for c in NativeEngine(model).generate(prompts, greedy):
        logits = reference_logits(model, prompts[c.prompt_index], c.token_ids)
        chosen = logits.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        assert (chosen >= logits.amax(-1) - 0.1).all()  # two may be within bfloat16's rounding
        same += int((logits.argmax(-1) == torch.tensor(c.token_ids)).sum())
        total += len(c.token_ids)
    assert calls
    assert same > 0.95 * total


@compiled
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shared", [0, 1 << 40], ids=["by columns", "by rows"])
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["qwen2", "ragged"])
def test_threads_change_no_bit(
    name: str, threads: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = MODELS[name]().bfloat16(), make_prompts(9)
    monkeypatch.setattr(decoding_ops, "_WORK_OF_A_THREAD", 1 << 60)
    expected = NativeEngine(model).generate(prompts, SAMPLED)
    monkeypatch.setattr(decoding_ops, "_WORK_OF_A_THREAD", 1)
    monkeypatch.setattr(decoding_ops, "_SHARED_BYTES", shared)
    before = torch.get_num_threads()
    # PyTorch's own operations may sum in another order: only the steps get more threads.
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = NativeEngine(model).generate(prompts, SAMPLED)
    monkeypatch.undo()
    assert torch.get_num_threads() == before
    assert found == expected


@compiled
def test_nan_weights_are_told(calls: list[int]) -> None:
    model = build("qwen2").bfloat16()
    engine = NativeEngine(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
    with pytest.raises(DivergedRolloutError, match="diverged"):
        engine.generate([[5, 6]], SAMPLED)


@compiled
def test_other_dtypes_are_left_to_pytorch(calls: list[int]) -> None:
    NativeEngine(build("qwen2")).generate([[5, 6]], SAMPLED)
    NativeEngine(build("qwen2").double()).generate([[5, 6]], SAMPLED)
    assert not calls


@compiled
def test_is_compiled_once_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.__wrapped__() is not None
    (built,) = (tmp_path / "hybridflyte").iterdir()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library.__wrapped__() is not None
    built.unlink()
    assert library.__wrapped__() is None


@compiled
def test_a_cache_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert library.__wrapped__() is not None


def test_its_sources_are_installed_with_the_package() -> None:
    folder = Path(decoding_ops.__file__).parent
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    installed = {path for pattern in patterns for path in folder.glob(pattern)}
    assert installed == set((folder / "cpu").iterdir())


def test_a_compiler_that_fails_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    assert library.__wrapped__() is None
    monkeypatch.setattr(decoding_ops, "library", lambda: None)
    done = NativeEngine(build("qwen2").bfloat16()).generate([[5, 6]], SAMPLED)
    assert [len(c.token_ids) > 0 for c in done] == [True] * 3


@compiled
def test_a_step_is_the_faster_one_of_two(
    calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(choices.VARIABLE, raising=False)
    monkeypatch.setattr(choices, "_file", lambda: tmp_path / "choices.jsonl")
    choices._known.cache_clear()
    model, prompts = MODELS["llama"]().bfloat16(), make_prompts(4)
    params = SamplingParams(n=2, max_new_tokens=12, seed=3)
    engine = NativeEngine(model, max_num_seqs=8)
    assert errors(model, prompts, engine.generate(prompts, params)).max() < 0.2
    [measured] = {choice.kernel for choice in choices.known_choices()}
    assert measured == "decode step"
    for name in choices.IMPLEMENTATIONS:
        calls.clear()
        with choices.force(name):
            assert errors(model, prompts, engine.generate(prompts, params)).max() < 0.2
        assert bool(calls) == (name == "compiled")
    choices._known.cache_clear()


ROWS = 400


def case(vocabulary: int, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[R, V]`, keys and columns `[R]`."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = spread * torch.randn(ROWS, vocabulary, generator=generator)
    rows = torch.arange(ROWS)
    return logits, noise_keys(11, rows // 8, rows % 8), rows % 50


needs_native = pytest.mark.skipif(library() is None, reason="no AVX512-BF16, or no C compiler")


@needs_native
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("vocabulary", [1, 5, 79, 256, 512, 4099])
def test_tokens_and_log_probs_are_the_rules(vocabulary: int, temperature: float) -> None:
    logits, keys, columns = case(vocabulary)
    params = SamplingParams(temperature=temperature)
    tokens, log_probs = draw(logits, keys, columns, params)
    expected, _ = sample(logits, uniforms(keys, columns), params)
    assert (tokens == expected).float().mean() > 0.99  # sums round in another order
    exact = (logits.double() / (temperature or 1.0)).log_softmax(-1).gather(1, tokens[:, None])
    assert torch.allclose(log_probs.double(), exact[:, 0], atol=1e-5)


@needs_native
def test_more_threads_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one = draw(*case(700), SamplingParams())
    monkeypatch.setattr(decoding_ops, "_ROWS_OF_TWO", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    several = draw(*case(700), SamplingParams())
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


@needs_native
def test_what_is_impossible_is_never_drawn() -> None:
    logits, keys, columns = case(600)
    logits[:, ::2] = -torch.inf
    logits[:, 300:] = -torch.inf
    tokens, log_probs = draw(logits, keys, columns, SamplingParams())
    assert (tokens % 2 == 1).all()
    assert (tokens < 300).all()
    assert log_probs.isfinite().all()


@needs_native
def test_a_nan_is_told_by_its_log_prob() -> None:
    logits, keys, columns = case(79)
    logits[3, 40] = torch.nan
    logits[5] = torch.inf
    for temperature in (1.0, 0.0):
        tokens, log_probs = draw(logits, keys, columns, SamplingParams(temperature=temperature))
        assert log_probs.isnan().nonzero()[:, 0].tolist() == [3, 5]
        assert ((tokens >= 0) & (tokens < 79)).all()
