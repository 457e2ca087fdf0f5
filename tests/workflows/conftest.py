"""One finished run that many tests read, and fresh places for those that run themselves."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from flyte_runs import (
    BY_DEFAULT,
    NO_WARM_START,
    ONE_STEP,
    REQUIRED,
    REWARD,
    SECRET,
    WORKFLOW,
    Asked,
    Finished,
    Place,
    TriedAgain,
    settings,
)
from once import MakeOnce
from protobufs import Registered
from registration import make_checkout, pack, read_archive


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Finished:
    """A finished run of the main job in a process of its own; some tests run again in its place."""
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
    place = Place(tmp_path_factory.mktemp("finished"))
    shutil.copy(mlflow_store, place.root / "mlflow.db")
    started = time.monotonic()
    command = ("run", str(WORKFLOW), "rlhf", "--config", config)
    outcome = place.pyflyte(*command, variables=secrets)
    assert outcome.code == 0, outcome.text
    return Finished(place, outcome, config, time.monotonic() - started)


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
    return partial(save_model, tmp_path)


def save_model(where: Path, kind: str, vocabulary: int = 0) -> Path:
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
    AutoModelForCausalLM.from_config(config).save_pretrained(where / kind)
    tokenizer.save_pretrained(where / kind)
    return where / kind


@pytest.fixture(scope="module")
def without_drawings() -> Iterator[None]:
    """Reports without what takes longest in a tiny run, for those that don't look at them."""
    with mock.patch("engine.evaluation.plots._to_svg", return_value="<svg></svg>"):
        yield


@pytest.fixture(scope="session")
def tried_again(
    new_place: Callable[[], Place], tmp_path_factory: pytest.TempPathFactory
) -> TriedAgain:
    """Both stages train adapters; the reward breaks the first time."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "quota_reward.py").write_text(REWARD)
    change = {
        "model": {"lora": {"rank": 4, "alpha": 8}},
        "rl": {
            "reward": {"name": "quota_reward:score", "on_error": "fail"},
            "trainer": {"total_training_steps": 1},
            "actor": {"entropy_coeff": 0.01},  # its gradient is there whatever the rewards are
        },
    }
    place, start = new_place(), save_model(folder, "llama")
    command = ("--model", str(start), "--config", settings(change))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr("engine.evaluation.plots._to_svg", lambda figure, name: "<svg></svg>")
        (folder / "broken").touch()
        failed = place.run(*command)
        shutil.copy(place.root / "mlflow.db", folder)
        half_written = list((place.artifacts / ".staging").glob("*"))
        (folder / "broken").unlink()
        again = place.run(*command)
    sys.modules.pop("quota_reward", None)
    between = f"sqlite:///{folder / 'mlflow.db'}"
    return TriedAgain(start, failed, between, half_written, again)


@pytest.fixture(scope="session")
def asked(new_place: Callable[[], Place], tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """It has no warm start, and its first model waits for consent."""
    place, start = new_place(), save_model(tmp_path_factory.mktemp("start"), "llama")
    command = ("--model", str(start), "--config")
    config = settings(ONE_STEP, NO_WARM_START, REQUIRED)
    return Asked(place, start, place.run(*command, config, answers="y\n"))


@pytest.fixture(scope="session")
def checkout(make_once: MakeOnce) -> Path:
    """A committed copy of the sources, which no one edits meanwhile."""
    return make_once("checkout", lambda folder: make_checkout(folder / "sources")) / "sources"


@pytest.fixture(scope="session")
def package(checkout: Path, make_once: MakeOnce) -> Path:
    """The archive that `workflows.register` writes, in another folder than the checkout's."""

    def write(folder: Path) -> None:
        shutil.copytree(checkout, folder / "elsewhere")
        pack(folder / "elsewhere", folder / "package.tgz", seed=0, umask=0o077)

    return make_once("package", write) / "package.tgz"


@pytest.fixture(scope="session")
def registered(package: Path) -> Registered:
    """What the archive holds."""
    return read_archive(package)
