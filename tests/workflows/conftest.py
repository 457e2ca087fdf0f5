"""One finished run that many tests read, and fresh places for those that run themselves."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock
from flyte_runs import BY_DEFAULT, SECRET, WORKFLOW, Finished, Outcome, Place, settings
from once import MakeOnce
from protobufs import Registered, serialised


@pytest.fixture(scope="session")
def finished_run(make_once: MakeOnce, mlflow_store: Path) -> Finished:
    # Credentials where a person has them: test_rlhf_end_to_end looks for them in all that is left.
    credentials = {"retrain": {"path": f"s3://key:{SECRET}@bucket/new"}}
    loggers = {"tracking": {"logger": ["console", "jsonl", "tensorboard"]}}
    config = settings(BY_DEFAULT, credentials, loggers)
    secrets = {
        "HYBRIDFLYTE_MLFLOW_URL": f"http://reader:{SECRET}@mlflow.example:5000",
        "MLFLOW_TRACKING_USERNAME": "writer",
        "MLFLOW_TRACKING_PASSWORD": SECRET,
        "AWS_ACCESS_KEY_ID": "writer",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }

    def write(folder: Path) -> None:
        shutil.copy(mlflow_store, folder / "mlflow.db")
        started = time.monotonic()
        command = ("run", str(WORKFLOW), "rlhf", "--config", config)
        outcome = Place(folder).pyflyte(*command, variables=secrets)
        assert outcome.code == 0, outcome.text
        facts = asdict(outcome) | {"seconds": time.monotonic() - started}
        folder.with_suffix(".json").write_text(json.dumps(facts))

    folder = make_once("finished", write)
    facts = json.loads(folder.with_suffix(".json").read_text())
    seconds = facts.pop("seconds")
    return Finished(Place(folder), Outcome(**facts), config, seconds)


@pytest.fixture
def finished(finished_run: Finished) -> Iterator[Finished]:
    """A finished run; one test at a time reads it, since some run again in its place."""
    with FileLock(finished_run.place.root.with_suffix(".use")):
        yield finished_run


@pytest.fixture(scope="session")
def new_place(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Callable[[], Place]:
    """Make fresh places, with an MLflow store each."""

    def make() -> Place:
        place = Place(tmp_path_factory.mktemp("place"))
        shutil.copy(mlflow_store, place.root / "mlflow.db")
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
def registered(make_once: MakeOnce) -> Registered:
    def write(folder: Path) -> None:
        (folder / "messages.pickle").write_bytes(pickle.dumps(serialised()))

    found = make_once("registered", write) / "messages.pickle"
    messages: Registered = pickle.loads(found.read_bytes())
    return messages
