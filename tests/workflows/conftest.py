"""One finished run that many tests read, and fresh places for those that run themselves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from flyte_runs import ON_RAY, WORKFLOW, Finished, Place, settings
from protobufs import Registered, serialised


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    place, config = Place(tmp_path_factory.mktemp("finished")), settings(ON_RAY)
    started = time.monotonic()
    outcome = place.pyflyte("run", str(WORKFLOW), "rlhf", "--config", config)
    assert outcome.code == 0, outcome.text
    return Finished(place, outcome, config, time.monotonic() - started)


@pytest.fixture(scope="session")
def new_place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Place]:
    """Make fresh places, with an MLflow store each; its migrations, which take 5 s, run once."""
    from engine.tracking.connection import Connection

    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    _ = Connection(f"sqlite:///{store}").client

    def make() -> Place:
        place = Place(tmp_path_factory.mktemp("place"))
        shutil.copy(store, place.root / "mlflow.db")
        return place

    return make


@pytest.fixture
def place(new_place: Callable[[], Place]) -> Place:
    return new_place()


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny model and its tokenizer as transformers does; return the folder."""

    def save(kind: str, vocabulary: int = 0) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        from engine.config import DataConfig
        from engine.data.sources import load_splits
        from engine.data.tokenizer import train_tokenizer

        rows = load_splits(DataConfig(sft_size=256), seed=0).sft_train
        prompts = [message["content"] for prompt in rows["prompt"] for message in prompt]
        tokenizer = train_tokenizer([*prompts, *rows["response"]], 512)
        config = AutoConfig.for_model(
            kind,
            vocab_size=vocabulary or len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
        tokenizer.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


@pytest.fixture(scope="session")
def registered() -> Registered:
    return serialised()
