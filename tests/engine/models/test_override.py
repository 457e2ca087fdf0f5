"""A start model with other values in its config.json: read by all, never of other shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import ConfigError
from engine.models import load_model
from engine.models.loading import check_overrides, link_model


def test_the_linked_model_is_the_same_with_the_changed_value(
    tiny_folder: Path, tmp_path: Path
) -> None:
    changes = check_overrides(
        str(tiny_folder), {"model_config": {"rms_norm_eps": 0.5}, "rope_theta": "7e1"}
    )
    link_model(str(tiny_folder), changes, tmp_path / "model")
    before, after = load_model(tiny_folder), load_model(tmp_path / "model")
    assert after.config.rms_norm_eps == 0.5
    assert after.config.rope_parameters["rope_theta"] == 70.0
    assert all(map(torch.equal, before.parameters(), after.parameters()))
    assert (tmp_path / "model" / "tokenizer.json").is_symlink()
    ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(before(ids).logits, after(ids).logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_droput": 0.1}, "is no key of a qwen2 .* did you mean attention_dropout?"),
        ({"attention_dropout": 0.1}, "without dropout; leave it out or set 0.0"),
        ({"intermediate_size": 64}, "changes the layout of the weights, first model"),
        ({"num_hidden_layers": 1}, "gives no model: "),
        ({"num_attention_heads": 3}, "leave out what sizes the model|gives no model"),
        ({"hidden_act": "nonsense"}, "gives no model"),
    ],
)
def test_what_can_t_be_overridden_is_one_sentence(
    tiny_folder: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_overrides(str(tiny_folder), changes)
    assert "\n" not in str(caught.value)


def test_kernels_cost_a_note(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert check_overrides(str(tiny_folder), {"attn_implementation": "eager"}) == {}
    assert "attn_implementation has no effect here" in caplog.text
