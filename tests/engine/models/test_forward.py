"""The forward pass and its selection of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import (
    completions_batch,
    outputs_with_kl,
    random_completions,
    response_log_probs,
    tiny_model,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch import Batch
from engine.cli.commands.student import main
from engine.config import LoRAConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import DataError, ModelError
from engine.kernels.training_ops import recurring_size
from engine.models import BaseModelView, add_adapters, create_critic_model, load_model
from engine.models.forward import response_values, token_outputs
from engine.models.packing import apply_packing, left_align
from engine.models.small_models import keep_layers
from engine.models.vocabulary_head import token_statistics


@torch.no_grad()
def logits_alone(model: PreTrainedModel, prompt: list[int], response: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double()
    return logits[len(prompt) - 1 : -1]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_outputs_equal_each_row_alone(family: str, temperature: float) -> None:
    model, reference = tiny_model(family), tiny_model(family, seed=1)
    prompts, responses = random_completions(9)
    batch = completions_batch(prompts, responses)
    with torch.no_grad():
        got = outputs_with_kl(
            model, batch, temperature, reference, entropy=True, sum_pi_squared=True
        )
        plain = token_outputs(model, batch, temperature)
    assert plain.entropy is plain.sum_pi_squared is plain.full_kl is None
    assert torch.equal(plain.log_probs, got.log_probs)
    assert got.entropy is not None
    assert got.sum_pi_squared is not None
    assert got.full_kl is not None
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        wanted = (logits_alone(model, prompt, response) / temperature).log_softmax(-1)
        other = (logits_alone(reference, prompt, response) / temperature).log_softmax(-1)
        n = len(response)
        pairs = [
            (got.log_probs, wanted.gather(1, torch.tensor(response)[:, None])[:, 0]),
            (got.entropy, -(wanted.exp() * wanted).sum(-1)),
            (got.sum_pi_squared, wanted.exp().square().sum(-1)),
            (got.full_kl, (wanted.exp() * (wanted - other)).sum(-1)),
        ]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours[row, :n].double(), theirs, atol=2e-5, rtol=0)
            assert ours[row, n:].eq(0).all()


@pytest.mark.usefixtures("one_thread")
def test_a_head_with_soft_capping_takes_the_whole_forward() -> None:
    model = tiny_model("qwen2")
    batch = completions_batch(*random_completions(5))
    with torch.no_grad():
        plain = response_log_probs(model, batch, 1.0)
        model.config.model_type = "some_family_unheard_of"
        whole = response_log_probs(model, batch, 1.0)
    torch.testing.assert_close(whole, plain)


@pytest.mark.usefixtures("one_thread")
def test_entropy_has_a_gradient_only_on_request() -> None:
    model, batch = tiny_model("qwen2"), completions_batch(*random_completions(4))
    without = token_outputs(model, batch, 1.0, entropy=True).entropy
    with_one = token_outputs(model, batch, 1.0, entropy=True, entropy_gradient=True).entropy
    assert without is not None
    assert with_one is not None
    assert torch.equal(without, with_one.detach())
    assert not without.requires_grad
    with_one.sum().backward()
    grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert max(grads) > 0


@pytest.mark.usefixtures("one_thread")
def test_entries_that_can_t_be_sampled_add_nothing_to_the_readout() -> None:
    """Logits of −inf, as of a padded vocabulary: numbers and gradients are those without them."""
    draw = torch.Generator().manual_seed(3)
    some, theirs = (torch.randn(5, 7, generator=draw) for _ in range(2))
    targets = torch.tensor([0, 6, 2, 3, 3])
    columns = torch.tensor([0, 1, 2, 4, 5, 7, 8])  # of 9; 3 and 6 are impossible
    results = []
    for wide in (False, True):
        ours = some.clone().requires_grad_()
        logits, reference, tokens = ours, theirs, targets
        if wide:
            logits, reference = (
                torch.full((5, 9), -torch.inf).index_copy(1, columns, of) for of in (ours, theirs)
            )
            tokens = columns[targets]
        out = token_statistics(
            logits, tokens, 0.7,
            entropy=True, entropy_gradient=True, sum_pi_squared=True, reference_logits=reference,
        )  # fmt: skip
        (out["log_probs"] + 2.0 * out["entropy"] + 3.0 * out["full_kl"]).sum().backward()
        results.append([*(out[name].detach() for name in sorted(out)), ours.grad])
    for got, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_values_equal_each_row_alone(family: str) -> None:
    critic = create_critic_model(tiny_model(family)).eval()
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    prompts, responses = random_completions(7)
    with torch.no_grad():
        values = response_values(critic, completions_batch(prompts, responses))
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            alone = critic(torch.tensor([prompt + response]))[0, len(prompt) - 1 : -1]
            n = len(response)
            torch.testing.assert_close(values[row, :n], alone, atol=1e-5, rtol=1e-5)
            assert values[row, n:].eq(0).all()
    assert values.abs().max() > 0.1


@pytest.mark.usefixtures("one_thread")
@given(rows=st.integers(1, 8), seed=st.integers(0, 10_000))
def test_left_align_lists_every_response_token_once(rows: int, seed: int) -> None:
    prompts, responses = random_completions(rows, seed)
    seqs = left_align(completions_batch(prompts, responses))
    assert seqs.input_ids.shape[1] == max(
        len(p) + len(r) for p, r in zip(prompts, responses, strict=True)
    )
    rebuilt: list[list[int]] = [[] for _ in prompts]
    for row, column, position, target in zip(
        seqs.rows.tolist(),
        seqs.columns.tolist(),
        seqs.positions.tolist(),
        seqs.targets.tolist(),
        strict=True,
    ):
        assert column == len(rebuilt[row])
        assert seqs.input_ids[row, position + 1] == target
        rebuilt[row].append(target)
    assert rebuilt == responses
    for row, prompt in enumerate(prompts):
        assert seqs.input_ids[row, : len(prompt)].tolist() == prompt


@pytest.mark.usefixtures("one_thread")
def test_a_row_without_a_prompt_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 1 .* empty prompt"):
        left_align(completions_batch([[5], []], [[6], [7]]))


@pytest.mark.usefixtures("one_thread")
def test_gradient_reaches_the_weights_and_padding_doesn_t_matter() -> None:
    model = tiny_model("llama")
    prompts, responses = random_completions(4)

    def gradient(pad: int) -> Tensor:
        batch = completions_batch(prompts, responses)
        ids = torch.where(batch["attention_mask"].bool(), batch["input_ids"], pad)
        model.zero_grad()
        response_log_probs(model, batch | {"input_ids": ids}, 1.0).sum().backward()
        return model.model.layers[0].mlp.up_proj.weight.grad.clone()

    zeros, nines = gradient(0), gradient(9)
    assert zeros.abs().sum() > 0
    torch.testing.assert_close(zeros, nines)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("plain_head", [True, False])
def test_packed_rows_give_the_same(family: str, plain_head: bool) -> None:
    batch = completions_batch(*random_completions(9))
    results = []
    for pack in (False, True):
        model, reference = tiny_model(family), tiny_model(family, seed=1)
        if not plain_head:
            model.config.model_type = reference.config.model_type = "some_family_unheard_of"
        if pack:
            apply_packing(model)
            apply_packing(reference)
            batch = batch | {"input_ids": batch["input_ids"].where(batch["attention_mask"] > 0, 96)}
        seen = seen_tokens(model)
        got = outputs_with_kl(model, batch, 0.8, reference, entropy=True, sum_pi_squared=True)
        assert seen == [packed_tokens(batch) if pack else seqs_size(batch)]
        assert got.full_kl is not None
        (got.log_probs.sum() + got.full_kl.sum()).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append([got.log_probs, got.entropy, got.sum_pi_squared, got.full_kl, grads])
    for padded, packed in zip(*results, strict=True):
        assert padded.shape == packed.shape
        torch.testing.assert_close(packed, padded, atol=1e-4, rtol=1e-4)


def seen_tokens(model: PreTrainedModel) -> list[int]:
    """Filled with how many positions each pass over `model` embeds."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(args[0].numel())
    )
    return seen


def packed_tokens(batch: Batch) -> int:
    """All but each row's last, which predicts nothing; filled up to a size that recurs."""
    return recurring_size(int(batch["attention_mask"].sum()) - len(batch))


def seqs_size(batch: Batch) -> int:
    return left_align(batch).input_ids.numel()


@pytest.mark.usefixtures("one_thread")
def test_packed_rows_give_a_critic_s_values_too() -> None:
    critic = create_critic_model(tiny_model("llama")).eval()
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    batch = completions_batch(*random_completions(7))
    with torch.no_grad():
        wanted = response_values(critic, batch)
        apply_packing(critic)
        seen = seen_tokens(critic.backbone)
        got = response_values(critic, batch)
    assert seen == [packed_tokens(batch)]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_packed_rows_go_with_adapters_and_their_base() -> None:
    model, batch = tiny_model("qwen2"), completions_batch(*random_completions(6))
    with torch.no_grad():
        base = response_log_probs(model, batch, 1.0)
        apply_packing(model)
        add_adapters(model, LoRAConfig(rank=3), seed=0)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.05)
        moved = response_log_probs(model, batch, 1.0)
        again = response_log_probs(BaseModelView(model), batch, 1.0)
    assert (moved - base).abs().max() > 0.01
    torch.testing.assert_close(again, base, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "qwen3_moe"])
def test_a_student_computes_what_the_teacher_does_without_the_other_layers(family: str) -> None:
    teacher = tiny_model(family)
    student = keep_layers(teacher, (1,))
    assert student.num_parameters() < teacher.num_parameters()
    assert student.config.num_hidden_layers == 1
    assert len(getattr(student.config, "layer_types", None) or "1") == 1
    layers = next(m for m in teacher.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    ids = torch.tensor([[5, 6, 7, 9]])
    with torch.no_grad():
        found = student(ids, use_cache=False).logits
        assert not torch.equal(found, teacher(ids, use_cache=False).logits)
        del layers[0]
        teacher.config.num_hidden_layers = 1
        torch.testing.assert_close(found, teacher(ids, use_cache=False).logits)
    with torch.no_grad():
        next(student.parameters()).zero_()
    assert next(teacher.parameters()).any(), "weights are copies"


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 2), (-1,), (0, 0)])
def test_layers_that_are_not_there_or_in_no_order(layers: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="of a model of 2: name some of 0 to 1, in ascending"):
        keep_layers(tiny_model("qwen2"), layers)


def test_the_command_writes_a_folder_or_nothing(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "student"
    assert main([str(tiny_folder), "--layers", "0", "--out", str(out), "--dry-run"]) == 0
    assert not out.exists()
    assert main([str(tiny_folder), "--layers", "0", "--out", str(out)]) == 0
    student, teacher = load_model(out), load_model(tiny_folder)
    assert f"{student.num_parameters():,} parameters of the teacher's" in capsys.readouterr().out
    assert student.config.num_hidden_layers == 1 < teacher.config.num_hidden_layers
    text = "2+3?"
    assert load_tokenizer(out).encode(text) == load_tokenizer(tiny_folder).encode(text)

    assert main([str(tiny_folder), "--layers", "0", "--out", str(out)]) == 1
    assert "is already there" in capsys.readouterr().err
    assert main([str(tiny_folder), "--layers", "7", "--out", str(tmp_path / "none")]) == 1
    assert "layers=7 of a model of" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert [path.name for path in out.parent.iterdir()] == ["student"]
