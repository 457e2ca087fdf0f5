"""Ulysses on real gloo ranks: losses, gradients and weights are those of one rank alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine.config import LoRAConfig
from engine.errors import ConfigError, WorkerError
from engine.models import add_adapters
from engine.parallel.layout import DATA_AXES, Layout
from engine.parallel.process_groups import SHARD_AXES, Ranks
from engine.parallel.sequence_parallel import (
    apply_ulysses,
    local_tokens,
    split_tokens,
    sum_tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, STEPS, ROWS = 61, 2, 4
TOKEN_AXES = (*DATA_AXES, "sp")  # ranks with tokens of their own
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
}


def model_of(family: str, kv_heads: int = 1, **changes: Any) -> PreTrainedModel:
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "initializer_range": 0.2,
        "tie_word_embeddings": family == "qwen2",
        "sliding_window": None,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family](**(values | changes))).eval()


def rows_of(length: int) -> tuple[Tensor, Tensor]:
    """Left-aligned rows of mixed lengths [ROWS, length], and how long each is."""
    draw = torch.Generator().manual_seed(length)
    lengths = torch.randint(min(3, length), length + 1, (ROWS,), generator=draw)
    lengths[0] = length
    ids = torch.randint(1, VOCABULARY, (ROWS, length), generator=draw)
    return ids * (torch.arange(length) < lengths[:, None]), lengths


def predicted(lengths: Tensor, prompt: int = 2) -> tuple[Tensor, Tensor]:
    """Rows and columns [N] whose outputs predict the tokens after a prompt of `prompt`."""
    columns = torch.arange(int(lengths.max()))
    return ((columns >= prompt - 1) & (columns < lengths[:, None] - 1)).nonzero(as_tuple=True)


def loss_of(model: PreTrainedModel, ids: Tensor, lengths: Tensor, ranks: Ranks) -> Tensor:
    """Σ over tokens of −log p · (1 + how far off the row's mean): no term is a token's alone."""
    rows, positions = predicted(lengths)
    local, columns_of = split_tokens(ids, ranks)
    hidden = model.base_model(
        input_ids=local, position_ids=columns_of, use_cache=False
    ).last_hidden_state
    mine, columns = local_tokens(positions, hidden.shape[1], ranks)
    logits = model.get_output_embeddings()(hidden[rows[mine], columns])
    picked = logits.float().log_softmax(-1)
    targets = ids[rows, positions + 1][mine]
    picked = picked.gather(1, targets[:, None]).squeeze(1)
    flat = sum_tokens(picked.new_zeros(len(rows)).index_put((mine,), picked), ranks)
    table = flat.new_zeros(ids.shape).index_put((rows, positions), flat)
    return -(table.sum(1) + 0.05 * table.sum(1).square() / lengths).sum() / 10


def train(
    layout: Layout, family: str, length: int, kind: str, changes: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of some steps of plain gradient descent, the first gradients, the last weights."""
    ranks = Ranks.form(layout)
    model = model_of(family, **changes)
    if kind == "lora":
        add_adapters(model, LoRAConfig(rank=4, alpha=8.0), seed=0)
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    if layout.tp > 1:
        spread_heads(model, ranks)
    apply_ulysses(model, ranks)
    if kind == "fsdp" and ranks.mesh is not None:
        shard(model, ranks)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for _ in range(STEPS):
        ids, lengths = rows_of(length)
        part = torch.arange(ROWS).chunk(ranks.size(*DATA_AXES))[ranks.index(*DATA_AXES)]
        loss = loss_of(model, ids[part], lengths[part], ranks)
        loss.backward()
        losses.append(float(ranks.sum_over(loss.detach(), DATA_AXES)))
        grads = {
            n: whole(p.grad)
            if kind == "fsdp" and isinstance(p.data, DTensor)
            else ranks.sum_over(whole(p.grad), TOKEN_AXES)
            for n, p in model.named_parameters()
            if p.grad is not None
        }
        first = first or {n: g.clone() for n, g in grads.items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in grads:
                    parameter.sub_(0.01 * like(grads[name], parameter))
                parameter.grad = None
    return losses, first, {n: whole(p.detach()).clone() for n, p in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, other: Any) -> Any:
    if not isinstance(other.data, DTensor):
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements)


def spread_heads(model: PreTrainedModel, ranks: Ranks) -> None:
    """Tensor parallel attention: q, k and v by heads, o by its inputs."""
    for layer in model.base_model.layers:
        plan: Any = {f"self_attn.{x}_proj": ColwiseParallel() for x in "qkv"}
        parallelize_module(
            layer, ranks.submesh("tp"), plan | {"self_attn.o_proj": RowwiseParallel()}
        )


def shard(model: PreTrainedModel, ranks: Ranks) -> None:
    """FSDP2 over the ranks of SHARD_AXES; it sums gradients itself."""
    for layer in model.base_model.layers:
        module: Any = fully_shard(layer, mesh=ranks.submesh(*SHARD_AXES))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def assert_same(layout: Layout, family: str, length: int, kind: str = "plain", **more: Any) -> None:
    losses, grads, weights = train(Layout(), family, length, kind, more)
    assert losses[-1] < losses[0]
    for got_losses, got_grads, got_weights in run_ranks(
        layout.world_size, train, layout, family, length, kind, more
    ):
        assert got_losses == pytest.approx(losses, rel=2e-6, abs=2e-6)
        assert got_grads.keys() == grads.keys()
        for got, want in ((got_grads, grads), (got_weights, weights)):
            for name in want:
                scale = float(want[name].abs().max())
                assert (got[name] - want[name]).abs().max() <= 2e-5 * max(1.0, scale), name


@pytest.mark.parametrize(
    ("layout", "family", "kv_heads", "length"),
    and_slow(
        [
            (Layout(sp=2), "qwen2", 1, 12),
            (Layout(sp=2), "qwen3", 2, 13),
            (Layout(sp=4), "llama", 2, 3),
            (Layout(sp=2, tp=2), "qwen2", 2, 13),
        ],
        [
            (Layout(sp=2), "llama", 2, 13),
            (Layout(sp=4), "qwen2", 1, 17),
            (Layout(sp=4), "llama", 2, 15),
            (Layout(sp=4), "mistral", 4, 3),
            (Layout(dp=2, sp=2), "qwen3", 2, 11),
        ],
    ),
    ids=str,
)
def test_a_shared_sequence_trains_as_a_whole_one(
    layout: Layout, family: str, kv_heads: int, length: int
) -> None:
    assert_same(layout, family, length, kv_heads=kv_heads)


@pytest.mark.parametrize("kind", ["lora", "checkpointed", "fsdp"])
def test_it_goes_with(kind: str) -> None:
    layout = Layout(fsdp=2, sp=2) if kind == "fsdp" else Layout(sp=2)
    assert_same(layout, "qwen2", 11, kind)


def test_kv_heads_that_sp_does_not_divide_are_repeated_as_needed() -> None:
    """6 heads over 3 kv heads: a rank's 3 heads read one and a half of them."""
    assert_same(Layout(sp=2), "llama", 9, num_attention_heads=6, kv_heads=3, hidden_size=48)


def tokens_inside(length: int) -> tuple[list[int], list[int]]:
    """How many tokens the MLPs and the head of a model get, with sp ranks and with one."""
    ranks = Ranks.form(Layout(sp=dist.get_world_size()))
    counts = []
    for place in (ranks, Ranks(Layout())):
        model, seen = model_of("qwen2"), list[int]()
        apply_ulysses(model, place)

        def note(_: nn.Module, inputs: tuple[Tensor], seen: list[int] = seen) -> None:
            seen.append(inputs[0][..., 0].numel())

        for module in [*(layer.mlp for layer in model.base_model.layers), model.lm_head]:
            module.register_forward_pre_hook(note)
        ids, lengths = rows_of(length)
        loss_of(model, ids, lengths, place).backward()
        counts.append(seen)
    return counts[0], counts[1]


def test_each_rank_holds_its_share_of_the_tokens() -> None:
    answers = run_ranks(4, tokens_inside, 16)
    for shared, alone in answers:
        assert alone[:2] == [16 * ROWS] * 2
        assert shared[:2] == [4 * ROWS] * 2
    assert sum(shared[2] for shared, _ in answers) == answers[0][1][2], "each predicts its own"


@pytest.mark.parametrize(("length", "padded"), [(9, 10), (12, 12), (1, 2)])
def test_ranks_get_consecutive_tokens_and_their_positions(length: int, padded: int) -> None:
    ids = rows_of(length)[0]
    parts = [split_tokens(ids, Ranks(Layout(sp=2), rank)) for rank in range(2)]
    tokens, positions = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    assert torch.equal(tokens[:, :length], ids)
    assert not tokens[:, length:].any()
    assert torch.equal(positions, torch.arange(padded).expand(ROWS, padded))


def test_one_rank_needs_no_group() -> None:
    ranks = Ranks(Layout())
    model = model_of("llama")
    before = {name: module.__dict__.get("config") for name, module in model.named_modules()}
    apply_ulysses(model, ranks)
    after = {name: module.__dict__.get("config") for name, module in model.named_modules()}
    assert all(after[name] is before[name] for name in before)
    ids = torch.ones(2, 5, dtype=torch.long)
    local, positions = split_tokens(ids, ranks)
    assert torch.equal(local, ids)
    assert torch.equal(positions, torch.arange(5).expand(2, 5))
    hidden = torch.randn(2, 5, 3)
    assert sum_tokens(hidden, ranks) is hidden


def beside_others() -> tuple[float, float, bool]:
    """Apply it to one of two models of one configuration, and copy that one."""
    ranks = Ranks.form(Layout(sp=2))
    shared = model_of("llama")
    other = AutoModelForCausalLM.from_config(shared.config).eval()
    other.config = shared.config
    other.load_state_dict(shared.state_dict())
    ids = rows_of(8)[0]
    with torch.no_grad():
        wanted = other(input_ids=ids).logits
        apply_ulysses(shared, ranks)
        alone = other(input_ids=ids).logits
        local, positions = split_tokens(ids, ranks)
        twin = copy.deepcopy(shared)(input_ids=local, position_ids=positions, use_cache=False)
    own = wanted[:, ranks.rank * local.shape[1] :][:, : local.shape[1]]
    return (
        float((alone - wanted).abs().max()),
        float((twin.logits - own).abs().max()),
        shared.config._attn_implementation == "sdpa",
    )


def test_other_models_stay_as_they_are_and_copies_work() -> None:
    for leaked, off, kept in run_ranks(2, beside_others):
        assert leaked == 0.0
        assert off < 1e-5
        assert kept


def halves() -> float:
    ranks = Ranks.form(Layout(sp=2))
    model, alone = (model_of("qwen2").to(torch.bfloat16) for _ in range(2))
    apply_ulysses(model, ranks)
    ids, lengths = rows_of(12)
    loss_of(model, ids, lengths, ranks).backward()
    loss_of(alone, ids, lengths, Ranks(Layout())).backward()
    worst = 0.0
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        total = ranks.sum_over(ours.grad.float(), TOKEN_AXES)
        worst = max(worst, float((total - theirs.grad).norm() / theirs.grad.float().norm()))
    return worst


def test_bfloat16_travels_too() -> None:
    assert max(run_ranks(2, halves)) < 0.05


def misused(how: str) -> str:
    ranks = Ranks.form(Layout(sp=2))
    model = model_of("llama")
    apply_ulysses(model, ranks)
    ids = rows_of(8)[0]
    local, positions = split_tokens(ids, ranks)
    given: dict[str, Any] = {"use_cache": False}
    if how == "mask":
        given |= {"attention_mask": torch.tensor([[0, 1, 1, 1]] * ROWS), "position_ids": positions}
    elif how == "cache":
        cache = model_of("llama")(input_ids=local).past_key_values
        given = {"past_key_values": cache, "position_ids": positions}
    elif ranks.rank == 0:
        return "positions from 0 are rank 0's own"
    with pytest.raises(WorkerError) as caught, torch.no_grad():
        model(input_ids=local, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mask", "got an attention mask or a cache"),
        ("cache", "got an attention mask or a cache"),
        ("whole rows", "rank 1 of sp=2 got tokens from position 0, its own start at 4"),
    ],
)
def test_inputs_that_were_not_split_are_refused(how: str, message: str) -> None:
    assert message in run_ranks(2, misused, how)[1]


def refusal(what: str) -> str:
    ranks = Ranks.form(Layout(sp=2))
    model = model_of("llama")
    if what == "heads":
        model = model_of("llama", num_attention_heads=3, hidden_size=24)
    elif what == "eager":
        model.set_attn_implementation("eager")
    elif what == "window":
        model = model_of("mistral", sliding_window=4)
    else:
        model.base_model.layers[0].self_attn = nn.Identity()
    with pytest.raises(ConfigError) as caught:
        apply_ulysses(model, ranks)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("heads", "sp · tp = 2 does not divide the 3 attention heads"),
        ("eager", "attn_implementation='eager'"),
        ("window", "sliding-window attention"),
        ("shape", "is not that of a plain decoder"),
    ],
)
def test_models_that_it_does_not_fit_are_refused(what: str, message: str) -> None:
    assert all(message in text for text in run_ranks(2, refusal, what))
