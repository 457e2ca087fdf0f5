"""The head in chunks, and token statistics."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tiny_engine import completions_batch, random_completions, tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import LoRAConfig
from engine.models import add_adapters, forward
from engine.models.vocabulary_head import chunked_statistics, takes_chunks, token_statistics

TOKENS, WIDTH, VOCABULARY = 37, 16, 29


ALL: dict[str, bool] = {"entropy": True, "entropy_gradient": True, "sum_pi_squared": True}


def case(dtype: torch.dtype, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states that need a gradient, and targets."""
    draw = torch.Generator().manual_seed(5)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    hidden = torch.randn(TOKENS, WIDTH, generator=draw).to(dtype).requires_grad_()
    return head, hidden, torch.randint(VOCABULARY, (TOKENS,), generator=draw)


def with_gradients(out: dict[str, Tensor], *inputs: Tensor) -> list[Tensor]:
    """Outputs, then gradients of a sum that weighs each token differently."""
    weights = torch.linspace(-1.0, 2.0, TOKENS)
    loss = (weights * out["log_probs"]).sum() + (weights.flip(0) * out["entropy"]).sum()
    assert not out["sum_pi_squared"].requires_grad
    return [out[name].detach() for name in sorted(out)] + list(torch.autograd.grad(loss, inputs))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("chunk", [1, 10, TOKENS, 0])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_statistics_of_all_logits(chunk: int, bias: bool) -> None:
    head, hidden, targets = case(torch.float32, bias)
    inputs = (hidden, *head.parameters())
    wanted = with_gradients(token_statistics(head(hidden), targets, 0.7, **ALL), *inputs)
    got = chunked_statistics(head, hidden, targets, 0.7, chunk_tokens=chunk, **ALL)
    for ours, theirs in zip(with_gradients(got, *inputs), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("chunk", [10, TOKENS])
def test_gradients_are_those_of_finite_differences(chunk: int) -> None:
    head, hidden, targets = case(torch.float64, bias=True)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        linear: Any = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
        del linear.weight, linear.bias
        linear.weight, linear.bias = weight, bias
        out = chunked_statistics(linear, hidden, targets, 1.3, chunk_tokens=chunk, **ALL)
        return out["log_probs"], out["entropy"]

    assert torch.autograd.gradcheck(run, (hidden, head.weight, head.bias), fast_mode=True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("chunk", [10, TOKENS])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_near_as_plain_bfloat16(chunk: int, autocast: bool) -> None:
    exact = case(torch.float32)
    exact[0].weight.data = exact[0].weight.data.bfloat16().float()
    exact[1].data = exact[1].data.bfloat16().float()
    truth = with_gradients(
        token_statistics(exact[0](exact[1]), exact[2], 0.7, **ALL), exact[1], exact[0].weight
    )
    head, hidden, targets = exact if autocast else case(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = token_statistics(head(hidden), targets, 0.7, **ALL)
        ours = chunked_statistics(head, hidden, targets, 0.7, chunk_tokens=chunk, **ALL)
    inputs = hidden, head.weight
    for true, theirs, got in zip(
        truth, with_gradients(plain, *inputs), with_gradients(ours, *inputs), strict=True
    ):
        assert got.dtype == theirs.dtype
        error = (theirs.float() - true).norm()
        assert (got.float() - true).norm() <= 1.2 * error + 1e-6 * true.norm()


@pytest.mark.usefixtures("one_thread")
def test_entries_that_can_t_be_sampled_add_nothing() -> None:
    head, hidden, targets = case(torch.float32, bias=True)
    never = 3
    targets[targets == never] = 4
    with torch.no_grad():
        head.bias[never] = -torch.inf
    inputs = (hidden, head.weight)
    got = chunked_statistics(head, hidden, targets, 0.7, chunk_tokens=10, **ALL)
    wanted = token_statistics(head(hidden), targets, 0.7, **ALL)
    for ours, theirs in zip(
        with_gradients(got, *inputs), with_gradients(wanted, *inputs), strict=True
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


class _Largest(TorchDispatchMode):
    """Notes the most elements of any result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.usefixtures("one_thread")
def test_no_tensor_is_as_large_as_the_logits() -> None:
    head, hidden = nn.Linear(8, 1000, bias=False), torch.randn(300, 8, requires_grad=True)
    targets = torch.arange(300)
    run = partial(chunked_statistics, head, hidden, targets, 1.0, entropy=True)
    for chunk, most in ((20, 20 * 1000), (300, 300 * 1000)):
        with _Largest() as seen:
            out = run(entropy_gradient=True, chunk_tokens=chunk)
            (out["log_probs"] + out["entropy"]).sum().backward()
        assert seen.elements == most


@pytest.mark.usefixtures("one_thread")
def test_the_forward_pass_of_a_tied_model_takes_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, entropy and the gradient of every weight are those of the model's own logits."""
    batch = completions_batch(*random_completions(6))
    calls: list[int] = []

    def in_chunks(head: Any, hidden: Tensor, *args: Any, **asked: Any) -> dict[str, Tensor]:
        calls.append(len(hidden))
        return chunked_statistics(head, hidden, *args, **asked, chunk_tokens=4)

    def of_logits(*args: Any, **asked: Any) -> dict[str, Tensor]:
        return token_statistics(*args, **asked)

    monkeypatch.setattr(forward, "chunked_statistics", in_chunks)
    results = []
    for statistics in (token_statistics, of_logits):
        model = tiny_model("qwen2")
        out = forward.token_outputs(
            model, batch, 0.7, entropy=True, entropy_gradient=True, statistics=statistics
        )
        assert out.entropy is not None
        (out.log_probs.sum() + 2.0 * out.entropy.sum()).backward()
        results.append([out.log_probs, out.entropy, *(p.grad for p in model.parameters())])
    assert calls == [int(batch["attention_mask"][:, -batch["responses"].shape[1] :].sum())]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("one_thread")
def test_heads_that_are_not_plain_are_left_alone() -> None:
    head = nn.Linear(4, 9)
    assert takes_chunks(head)
    handle = head.register_forward_hook(lambda module, args, out: 2 * out)
    assert not takes_chunks(head), "a hook may change the logits"
    handle.remove()
    assert takes_chunks(head)
    assert not takes_chunks(nn.Sequential(head))
    model = tiny_model("llama")
    add_adapters(model, LoRAConfig(rank=2, target_modules=("lm_head",)), seed=0)
    assert not takes_chunks(model.get_output_embeddings())


def statistics(logits: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    targets = torch.zeros(len(logits), dtype=torch.long)
    return token_statistics(
        logits, targets, temperature, entropy=True, entropy_gradient=True, sum_pi_squared=True
    )


def test_by_hand() -> None:
    got = statistics(torch.tensor([[1.0, 1.0, -torch.inf], [3.0, 3.0, 3.0]]))
    assert got["entropy"].tolist() == pytest.approx([math.log(2), math.log(3)])
    assert got["sum_pi_squared"].tolist() == pytest.approx([1 / 2, 1 / 3])
    quarter = statistics(torch.tensor([[0.0, 2 * math.log(3)]]), 2.0)  # 1/4 and 3/4
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert quarter["entropy"].item() == pytest.approx(expected)
    assert quarter["sum_pi_squared"].item() == pytest.approx(10 / 16)


def test_gradient_is_exact() -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (got,) = torch.autograd.grad(statistics(logits)["entropy"].sum(), logits)
    exact = logits.detach().double().requires_grad_()
    entropy = torch.distributions.Categorical(logits=exact).entropy()
    (expected,) = torch.autograd.grad(entropy.sum(), exact)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def test_impossible_tokens_give_finite_gradients() -> None:
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    statistics(logits)["entropy"].sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0] != 0


def test_low_precision_is_computed_in_float32() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    got, expected = statistics(logits), statistics(logits.float())
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name])
