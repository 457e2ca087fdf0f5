"""Tensor parallelism and its styles."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_models import CHANGES, family_model
from gloo_ranks import run_ranks
from thorough import and_slow
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from engine.config import LoRAConfig
from engine.errors import ConfigError
from engine.models import add_adapters
from engine.models.lora import adapter_parameters
from engine.models.value_head import create_critic_model
from engine.parallel import gradients
from engine.parallel.decoder_plan import FAMILIES
from engine.parallel.layout import DATA_AXES, Layout
from engine.parallel.pipeline_parallel import PipelineStage, extract_stage
from engine.parallel.process_groups import Ranks
from engine.parallel.tensor_parallel import (
    TOKENS,
    Style,
    apply_tensor_parallel,
    copy_to_ranks,
    gather_tokens,
    pad_tokens,
    redistribute,
    replicated,
    row_parallel,
    vocabulary_parallel,
)
from engine.parallel.vocab_parallel import VocabParallelStatistics, vocabulary_bounds

VOCABULARY, STEPS = 25, 2  # shards of the vocabulary are never equal


ROWS = ("o_proj", "down_proj", "dense", "fc2", "dense_4h_to_h", "c_proj")


LENGTHS = (9, 4)  # of each step's rows; 2 and 4 divide one of them


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is spread."""

    family: str
    tied: bool = False
    tp: int = 2
    dp: int = 1
    sequence_parallel: bool = True
    lora: bool = False
    kv_heads: int = 4

    def __str__(self) -> str:
        on = {"tied": self.tied, "lora": self.lora, "sequence": self.sequence_parallel}
        words = [self.family, f"tp{self.tp}", *(word for word, there in on.items() if there)]
        words += [f"kv{self.kv_heads}"] * (self.kv_heads != 4)
        return "-".join(words + ["dp"] * (self.dp > 1))


def model_of(case: Case, kv_heads: int = 0) -> PreTrainedModel:
    """The same weights for the same model, on every rank; grouped heads, 8 to 4."""
    model = family_model(
        case.family,
        seed=5,
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads or case.kv_heads,
        head_dim=4,
        initializer_range=0.2,
        tie_word_embeddings=case.tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if case.lora:
            names = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
            names = ("qkv_proj", "o_proj", "gate_up_proj") if case.family == "phi3" else names
            add_adapters(model, LoRAConfig(rank=3, alpha=6, target_modules=names), 3)
            for parameter in adapter_parameters(model).values():
                nn.init.normal_(parameter, std=0.2)
    return model


def rows(step: int) -> Tensor:
    """Token ids [4, L], with an id that has no gradient (padding) among them."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (4, LENGTHS[step]), generator=draw)


def loss_of(model: Any, ids: Tensor, statistics: VocabParallelStatistics) -> Tensor:
    """Next tokens' log-probs and entropies, over a count that all ranks know."""
    logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    found = statistics(logits, ids[:, 1:].flatten(), 0.8, entropy=True, entropy_gradient=True)
    return -(found["log_probs"] + 0.1 * found["entropy"]).sum() / 40


Trained = tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]


def train(case: Case) -> Trained:
    """Losses and gradient norms of some steps, first gradients and last weights, whole."""
    ranks = Ranks.form(Layout(dp=case.dp, tp=case.tp))
    model = model_of(case)
    statistics = VocabParallelStatistics(0, VOCABULARY, None)
    if case.tp > 1:
        mesh = ranks.submesh("tp")
        apply_tensor_parallel(model, mesh, sequence_parallel=case.sequence_parallel)
        statistics = VocabParallelStatistics.of(VOCABULARY, mesh)
        check_parameters(model, model_of(case), mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3, foreach=False)
    losses, norms = [], []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        mine = rows(step)[ranks.index(*DATA_AXES) :: ranks.size(*DATA_AXES)]
        total = torch.zeros(())
        for part in mine.chunk(2):  # gradients of several passes add up
            loss = loss_of(model, part, statistics)
            loss.backward()
            total += loss.detach()
        losses.append(float(ranks.sum_over(total, DATA_AXES)))
        gradients.all_reduce_gradients(trained, ranks, bucket_elements=500)
        check_gradients(trained)
        first = first or {n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        norms.append(gradients.clip_grad_norm(trained, ranks, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, first, {n: whole(p.detach()) for n, p in model.named_parameters()}


def check_parameters(model: nn.Module, plain: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter is a DTensor of its old name and shape; matrices are really split."""
    expected = dict(plain.named_parameters())
    found: dict[str, Any] = dict(model.named_parameters())
    assert found.keys() == expected.keys()  # a tied matrix is one parameter still
    for name, parameter in found.items():
        assert isinstance(parameter.data, DTensor)
        assert parameter.shape == expected[name].shape
        assert parameter.requires_grad == expected[name].requires_grad
        split = [p.dim for p in parameter.placements if isinstance(p, Shard)]
        kind = name.replace(".base_layer", "").split(".")[-2]
        if parameter.dim() == 2 and "lora_" not in name:
            assert split == [1 if kind in ROWS else 0], name
        if split:
            assert parameter.to_local().numel() < parameter.numel() * 0.6
    assert mesh.size() == dist.get_world_size(mesh.get_group())


def check_gradients(trained: list[nn.Parameter]) -> None:
    """Each is spread over the mesh as its parameter is."""
    for parameter in trained:
        gradient: Any = parameter.grad
        if isinstance(parameter.data, DTensor):
            assert isinstance(gradient, DTensor)
            assert gradient.placements == parameter.data.placements


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@functools.cache
def alone(case: Case) -> Trained:
    return train(case)


CASES = [
    Case("llama", tied=True, sequence_parallel=False),
    Case("qwen3", tp=4),
    Case("qwen2", lora=True),
]


MORE = [
    Case("qwen2", tied=True, dp=2),
    Case("qwen2", tied=True),
    Case("mistral"),
    Case("qwen2", sequence_parallel=False),
    Case("qwen3"),
    Case("qwen3", tied=True, sequence_parallel=False),
    Case("llama"),
    Case("mistral", sequence_parallel=False),
    Case("llama", tp=4, tied=True, sequence_parallel=False),
    Case("llama", lora=True, tied=True, sequence_parallel=False),
    Case("qwen3", lora=True, tp=4),
]


# One start of ranks trains all of these.
FAMILIES_CASES = [
    Case("gemma2", tied=True),
    Case("phi3"),
    Case("gpt_neox"),
    Case("qwen2", kv_heads=1),
]


FAMILIES_MORE = [
    *(Case(family) for family in CHANGES if family not in ("llama", "mistral", "qwen2", "qwen3")),
    *(Case(family, sequence_parallel=False) for family in CHANGES),
    *(Case(family, kv_heads=1) for family in ("llama", "phi3", "gemma3_text", "olmo2")),
    Case("phi3", lora=True),
    Case("llama", lora=True, kv_heads=1),
    Case("olmo2", lora=True),
]


@pytest.mark.parametrize("case", and_slow(CASES, MORE), ids=str)
def test_training_on_tp_ranks_is_training_on_one(case: Case) -> None:
    check_training(case, run_ranks(case.tp * case.dp, train, case))


def train_all(cases: list[Case]) -> list[Trained]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("cases", and_slow([FAMILIES_CASES], [FAMILIES_MORE]), ids=len)
def test_other_families(cases: list[Case]) -> None:
    for case, *results in zip(cases, *run_ranks(2, train_all, cases), strict=True):
        check_training(case, results)


def check_training(case: Case, results: list[Trained]) -> None:
    """Ranks' losses, gradients and weights are those of one rank."""
    wanted = alone(replace(case, tp=1, dp=1, sequence_parallel=True))
    for losses, norms, first, weights in results:
        assert losses == pytest.approx(wanted[0], rel=2e-6), case
        assert norms == pytest.approx(wanted[1], rel=5e-6), case
        assert first.keys() == wanted[2].keys()
        for name, gradient in wanted[2].items():
            note = f"{case}: {name}"
            torch.testing.assert_close(first[name], gradient, rtol=1e-4, atol=2e-6, msg=note)
        assert weights.keys() == wanted[3].keys()
        for name, weight in wanted[3].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=2e-5, msg=name)
        for name in weights:  # replicated parameters stay the same bits
            assert torch.equal(weights[name], results[0][3][name]), name


def between_the_matrices(sequence_parallel: bool) -> list[tuple[int, ...]]:
    """Shapes of what the norms read, of the layers' output, and of the logits."""
    model: Any = model_of(Case("llama"))
    mesh = init_device_mesh("cpu", (2,))
    apply_tensor_parallel(model, mesh, sequence_parallel=sequence_parallel)
    seen: list[tuple[int, ...]] = []
    for norm in (model.model.layers[1].input_layernorm, model.model.norm):
        norm.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    seen.append(tuple(model(torch.ones(3, 7, dtype=torch.long), use_cache=False).logits.shape))
    return seen


@pytest.mark.parametrize(("sequence_parallel", "tokens"), [(True, 4), (False, 7)])
def test_norms_are_on_shares_of_the_tokens(sequence_parallel: bool, tokens: int) -> None:
    """7 tokens on two ranks are 4 each, one of them padding; the logits are 13 and 12 wide."""
    for rank, seen in enumerate(run_ranks(2, between_the_matrices, sequence_parallel)):
        start, stop = vocabulary_bounds(VOCABULARY, 2, rank)
        assert seen == [(3, tokens, 24), (3, 7, 24), (3, 7, stop - start)]


def values_of_a_critic(tp: int) -> tuple[Tensor, dict[str, Tensor]]:
    critic = create_critic_model(model_of(Case("qwen2")))
    nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    if tp > 1:
        apply_tensor_parallel(critic, init_device_mesh("cpu", (tp,)))
    values = critic(rows(0))
    values.square().sum().backward()
    return values.detach(), {n: whole(p.grad) for n, p in critic.named_parameters()}


def test_a_critic() -> None:
    wanted, gradients_alone = values_of_a_critic(1)
    for values, grads in run_ranks(2, values_of_a_critic, 2):
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)
        assert grads.keys() == gradients_alone.keys()
        for name, gradient in gradients_alone.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(
                grads[name], gradient, rtol=1e-3, atol=1e-5 * max(1.0, scale), msg=name
            )


def stage_by_stage() -> Tensor:
    """Hidden states after both stages of two, each spread over two ranks."""
    model = model_of(Case("qwen3"))
    hidden: Any = rows(0)
    for stage in range(2):
        part: PipelineStage = extract_stage(model, stage, 2)
        apply_tensor_parallel(part, init_device_mesh("cpu", (2,)))
        hidden = part(hidden)
    return hidden.detach()


def test_pipeline_stages() -> None:
    model: Any = model_of(Case("qwen3"))
    with torch.no_grad():
        wanted = model.model(rows(0), use_cache=False).last_hidden_state
    for hidden in run_ranks(2, stage_by_stage):
        torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-5)


def on_one_rank() -> bool:
    model = model_of(Case("llama"))
    before = dict(model.named_parameters())
    apply_tensor_parallel(model, init_device_mesh("cpu", (1,)))
    return all(p is before[name] for name, p in model.named_parameters())


def test_one_rank_leaves_the_model_as_it_is() -> None:
    assert run_ranks(1, on_one_rank) == [True]


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=4))


def with_adapters_on(*names: str) -> nn.Module:
    model = model_of(Case("llama"))
    add_adapters(model, LoRAConfig(rank=2, target_modules=names), 0)
    return model


def with_dora() -> nn.Module:
    from peft import LoraConfig

    model = model_of(Case("llama"))
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    return model


def with_another_linear() -> nn.Module:
    model: Any = model_of(Case("llama"))
    model.model.layers[0].mlp.up_proj = nn.Identity()
    return model


def with_another_matrix() -> nn.Module:
    model: Any = model_of(Case("llama"))
    model.model.layers[1].mlp.gate = nn.Parameter(torch.ones(2, 2))
    return model


def few_entries() -> nn.Module:
    model: Any = model_of(Case("llama"))
    model.config.vocab_size = 3
    return model


REFUSED = {
    "gpt2": (gpt2, 2, "a model of type 'gpt2' has no tensor-parallel plan .* set tp=1"),
    "no-config": (lambda: nn.Linear(2, 2), 2, "a model of type 'Linear' has no tensor-parallel"),
    "heads": (lambda: model_of(Case("llama")), 3, "tp=3 does not divide .*attention_heads=8"),
    "unnamed": (with_another_matrix, 2, "layers.1.mlp' has a matrix 'gate' that the model's"),
    "vocabulary": (few_entries, 4, "tp=4 leaves a rank without any of the vocabulary's 3 entries"),
    "embedding": (
        lambda: with_adapters_on("q_proj", "embed_tokens"),
        2,
        "target_modules names 'model.embed_tokens', whose adapter tp can't split; leave",
    ),
    "dora": (with_dora, 2, "q_proj' has a DoRA adapter, which tp can't split; set tp=1"),
    "kind": (with_another_linear, 2, "mlp.up_proj' is a Identity, which tp can't split"),
}


def refused(name: str) -> tuple[str, bool]:
    """The complaint, and whether the model is as it was."""
    make, tp, _ = REFUSED[name]
    model = make()
    before = {n: (id(p), type(m)) for m in model.modules() for n, p in m.named_parameters()}
    dist.barrier()  # a rank that has its answer leaves, and others may still be meeting
    try:
        apply_tensor_parallel(model, init_device_mesh("cpu", (tp,)))
    except ConfigError as error:
        after = {n: (id(p), type(m)) for m in model.modules() for n, p in m.named_parameters()}
        return str(error), before == after
    return "", False


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_spread(name: str) -> None:
    _, tp, problem = REFUSED[name]
    for text, untouched in run_ranks(tp, refused, name):
        with pytest.raises(ConfigError, match=problem):
            raise ConfigError(text)
        assert untouched


def test_each_family_is_tested() -> None:
    assert set(FAMILIES) == set(CHANGES)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_ranks() -> tuple[DeviceMesh, int]:
    mesh = init_device_mesh("cpu", (2,))
    return mesh, mesh.get_local_rank()


def sharded(module: nn.Module, mesh: DeviceMesh, style: Style) -> Any:
    """A copy of `module` in this style, of the same class."""
    found = copy.deepcopy(module)
    style(found, mesh)
    assert type(found) is type(module)
    return found


def moved() -> None:
    """Values and gradients of every way of moving activations."""
    mesh, rank = two_ranks()
    tokens = draw(2, 6, 3)
    mine = tokens[:, 3 * rank : 3 * rank + 3].clone().requires_grad_()
    weights = draw(2, 6, 3, seed=1)
    (redistribute(mine, mesh, TOKENS, Replicate()) * weights).sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, weights[:, 3 * rank : 3 * rank + 3])

    mine.grad = None  # each rank reads all tokens and does something else with them
    whole = gather_tokens(mine, mesh)
    assert torch.equal(whole, tokens)
    (whole * (1 + 9 * rank)).sum().backward()
    torch.testing.assert_close(mine.grad, torch.full((2, 3, 3), 11.0))

    same = tokens.clone().requires_grad_()
    (copy_to_ranks(same, mesh) * (1 + 9 * rank)).sum().backward()
    torch.testing.assert_close(same.grad, torch.full((2, 6, 3), 11.0))

    term = (tokens * (1 + rank)).requires_grad_()
    total = redistribute(term, mesh, Partial(), Replicate())
    torch.testing.assert_close(total, 3 * tokens)
    (total * weights).sum().backward()
    torch.testing.assert_close(term.grad, weights)

    term = (tokens * (1 + rank)).requires_grad_()
    share = redistribute(term, mesh, Partial(), TOKENS)
    torch.testing.assert_close(share, 3 * tokens[:, 3 * rank : 3 * rank + 3])
    (share * weights[:, 3 * rank : 3 * rank + 3]).sum().backward()
    torch.testing.assert_close(term.grad, weights)


def test_moving_activations_and_their_gradients() -> None:
    run_ranks(2, moved)


def padded() -> list[tuple[int, ...]]:
    mesh, _ = two_ranks()
    five, four = draw(2, 5, 3), draw(2, 4, 3)
    found = pad_tokens(five, mesh)
    assert torch.equal(found[:, :5], five)
    assert not found[:, 5:].any()
    assert pad_tokens(four, mesh) is four
    return [tuple(found.shape)]


def test_padding_until_ranks_divide_the_tokens() -> None:
    assert run_ranks(2, padded) == [[(2, 6, 3)]] * 2


def row_linear(shard_tokens: bool, bias: bool) -> None:
    """Against the whole module: 5 tokens, so that one rank's shard is padded."""
    mesh, rank = two_ranks()
    whole: Any = nn.Linear(6, 4, bias=bias)
    whole.weight.data = draw(4, 6, seed=2)
    if bias:
        whole.bias.data = draw(4, seed=3)
    x, weights = draw(2, 5, 6).requires_grad_(), draw(2, 5, 4, seed=1)
    expected = whole(x)
    (expected * weights).sum().backward()
    split = sharded(whole, mesh, row_parallel(shard_tokens))
    columns = slice(3 * rank, 3 * rank + 3)
    mine = x.detach()[..., columns].clone().requires_grad_()
    got = split(mine)
    if shard_tokens:
        assert got.shape == (2, 3, 4)
        got = redistribute(got, mesh, TOKENS, Replicate())[:, :5]
    torch.testing.assert_close(got, expected)
    (got * weights).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, x.grad[..., columns])
    torch.testing.assert_close(split.weight.grad.to_local(), whole.weight.grad[:, columns])
    if bias:
        torch.testing.assert_close(split.bias.grad.full_tensor(), whole.bias.grad)


@pytest.mark.parametrize("shard_tokens", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_matrix_split_by_columns(shard_tokens: bool, bias: bool) -> None:
    run_ranks(2, row_linear, shard_tokens, bias)


def embedding(padding: int | None) -> None:
    """A table of 7 rows: 4 on the first rank, 3 on the second."""
    mesh, rank = two_ranks()
    whole: Any = nn.Embedding(7, 3, padding_idx=padding)
    whole.weight.data = draw(7, 3, seed=2)  # the padding row too, so that it is looked up
    ids = torch.tensor([[0, 6, 3, 4], [5, 5, 1, 3]])
    weights = draw(2, 4, 3, seed=1)
    (whole(ids) * weights).sum().backward()
    split = sharded(whole, mesh, vocabulary_parallel())
    got = split(ids)
    torch.testing.assert_close(got, whole(ids))
    (got * weights).sum().backward()
    rows = slice(4 * rank, 4 * rank + 4)
    torch.testing.assert_close(split.weight.grad.to_local(), whole.weight.grad[rows])


@pytest.mark.parametrize("padding", [None, 3, 5])
def test_a_table_split_by_rows(padding: int | None) -> None:
    run_ranks(2, embedding, padding)


def local_norm(sum_gradients: bool) -> None:
    """A norm whose ranks see different tokens, or the same ones."""
    mesh, rank = two_ranks()
    whole = nn.LayerNorm(3)
    split = sharded(whole, mesh, replicated(sum_gradients))
    x = draw(2, 4, 3)
    whole(x).square().sum().backward()
    split(x[rank : rank + 1] if sum_gradients else x).square().sum().backward()
    for name in ("weight", "bias"):
        gradient = getattr(split, name).grad
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), getattr(whole, name).grad)
    try:
        split(torch.ones(2, 5))  # another width
    except RuntimeError:
        assert isinstance(split.weight.data, DTensor)  # as before the pass that failed
    else:
        raise AssertionError("a norm of 3 took 5")


@pytest.mark.parametrize("sum_gradients", [True, False])
def test_replicated_parameters_compute_with_local_parts(sum_gradients: bool) -> None:
    run_ranks(2, local_norm, sum_gradients)
