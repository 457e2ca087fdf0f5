"""The same bad input gets the same sentence at every door, before anything is computed.

To add a door, write what it does in `DOORS`; to add an input, write what is bad in `INPUTS`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows, tiny_model
from tokenizers import normalizers
from transformers import AddedToken

from engine import RLTrainer as CompatTrainer
from engine import Trainer, make_rl_data_loader
from engine.cli.commands import main_ppo, main_preference, main_reward_model, main_sft
from engine.config import (
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    PairsConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLConfig,
    SFTConfig,
)
from engine.data import training_examples
from engine.data.loader import PromptLoader
from engine.data.tokenizer import load_tokenizer
from engine.errors import DataError, EngineError, ModelError
from engine.evaluation.scoring import evaluate_model
from engine.models import check_vocabulary, vocabulary_and_context
from engine.preferences import rank_rollouts
from engine.runtime import HybridActor
from engine.serve.native_backend import NativeBackend
from engine.stages import dataset, evaluation, fetch, preferences, row_checks, training
from engine.stages.settings import EvaluationSettings
from engine.trainers import preference_learning
from engine.trainers.offline import SFTTrainer
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True, slots=True)
class Place:
    """A model's folder, and files of rows of each kind beside it."""

    model: Path

    def file(self, name: str) -> str:
        return str(self.model.parent / f"{name}.jsonl")

    def write(self, name: str, *rows: dict[str, Any]) -> None:
        Path(self.file(name)).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    place = Place(Path(shutil.copytree(tiny_folder, tmp_path / "model")))
    place.write("prompts", *arithmetic_rows(8))
    place.write("sft", {"prompt": "1+1=", "response": "2"})
    place.write("pairs", {"prompt": "1+1=", "chosen": "2", "rejected": "3"})
    set_context(place, 1024)
    steps = {"completions": ["1+1=2", "so 2"], "labels": [True, True]}
    place.write("steps", {"prompt": "1+1=", **steps})
    return place


def set_context(place: Place, tokens: int) -> None:
    config = place.model / "config.json"
    values = json.loads(config.read_text()) | {"max_position_embeddings": tokens}
    config.write_text(json.dumps(values))


# What is bad.


def edit_tokenizer(place: Place, change: Callable[[Any], object]) -> None:
    tokenizer = load_tokenizer(place.model)
    change(tokenizer)
    tokenizer.save_pretrained(place.model)


def foreign_tokenizer(place: Place) -> None:
    beyond = vocabulary_and_context(place.model)[0]
    edit_tokenizer(place, lambda tokenizer: tokenizer.add_tokens([f"t{i}" for i in range(beyond)]))


def no_tokenizer(place: Place) -> None:
    for file in place.model.glob("tokenizer*"):
        file.unlink()


def no_weights(place: Place) -> None:
    (place.model / "model.safetensors").unlink()


def no_end_token(place: Place) -> None:
    def remove(tokenizer: Any) -> None:
        tokenizer.chat_template = tokenizer.chat_template.replace(tokenizer.eos_token, "")
        tokenizer.eos_token = None

    edit_tokenizer(place, remove)


def short_context(place: Place) -> None:
    set_context(place, 200)


def equal_once_encoded(place: Place) -> None:
    def normalise(tokenizer: Any) -> None:
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()

    edit_tokenizer(place, normalise)
    place.write("pairs", {"prompt": "1+1=", "chosen": "caf\u00e9", "rejected": "cafe\u0301"})


# The doors.


def command(main: Callable[[list[str]], int], file: str, *more: str) -> Callable[..., object]:
    def run(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
        given = [f"data.train_files={place.file(file)}", f"model.path={place.model}", *more]
        status = main([*given, "--dry-run"])
        said = capsys.readouterr().err
        assert (status, said.count("\n")) == (2, 1), said
        raise EngineError(said.removeprefix("error: ").strip())

    return run


def trainer_of_folder(place: Place) -> None:
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(8)), 4, 0)
    RLTrainer(place.model, RLConfig(), loader, max_response_length=200, max_model_len=230)


def compat_trainer(place: Place) -> None:
    loader = make_rl_data_loader(place.file("prompts"), batch_size=4)
    config = {"data.max_response_length": 200}
    CompatTrainer(actor_model=str(place.model), data_loader=loader, algo="grpo", config=config)


def from_hf_config(place: Place) -> None:
    out = str(place.model.parent / "out")
    data = {
        "train_files": [place.file("prompts")],
        "train_batch_size": 4,
        "max_response_length": 200,
    }
    settings = {"data": data, "trainer": {"default_local_dir": out, "total_training_steps": 1}}
    Trainer.from_hf_config(place.model, **settings).train()


def evaluate(place: Place) -> None:
    rows, config = pd.DataFrame(arithmetic_rows(4)), EvaluateConfig(samples=1, k=1)
    evaluate_model(place.model, rows, "rl", config, max_response_length=200, seed=0)


def rollouts_for_pairs(place: Place) -> None:
    rows = pd.DataFrame(arithmetic_rows(4))
    rank_rollouts(place.model, rows, PairsConfig(n=2), max_response_length=200, seed=0)


def dataset_stage(place: Place) -> None:
    data = DataConfig(max_response_length=200, sft_size=16, train_size=16, test_size=4)
    splits = dataset.sources.load_splits(data, 0)
    tokenizer = row_checks.choose_tokenizer(splits, data, str(place.model))
    context = vocabulary_and_context(place.model)[1]
    row_checks.fit_to_context(splits, tokenizer, data, context)


NO_SPLITS: Any = None  # from which a tokenizer is trained where there is no model


def sft_stage(place: Place) -> None:
    """The tokenizer of the stage `dataset`, then the warm start."""
    folder, config = place.model.parent, SFTConfig(threads=1)
    rows = [json.loads(line) for line in Path(place.file("sft")).read_text().splitlines()]
    frame = pd.DataFrame([{**row, "prompt": as_chat(row["prompt"])} for row in rows])
    frame.to_parquet(folder / "sft_train.parquet")
    tokenizer = row_checks.choose_tokenizer(NO_SPLITS, DataConfig(), str(place.model))
    start = ModelConfig(path=str(place.model))
    model = training.start_model(start, config, tokenizer, 0, folder / "scratch")
    examples = training.read_examples(folder, "train", tokenizer)
    SFTTrainer(model, tokenizer.pad_token_id, config, seed=0).fit(examples)


def as_chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def preference_stage(place: Place, read: Any = training_examples.read_preferences) -> None:
    pairs = place.model.parent
    rows = Path(place.file("pairs")).read_text().splitlines()
    frame = pd.DataFrame(map(json.loads, rows))
    for split in preferences.SPLITS:
        frame.to_parquet(pairs / f"{split}.parquet")
    stage: Any = SimpleNamespace(inputs={"pairs": pairs, "policy": place.model})
    preferences.read_examples(stage, read, "fail")


def reward_model_stage(place: Place) -> None:
    preference_stage(place, training_examples.read_reward_pairs)


def evaluate_only(place: Place) -> None:
    """The stage `fetch` of the candidate, then its evaluation, here against itself."""
    candidate = fetch.resolve(str(place.model), "candidate", "hybridflyte")
    data, config = DataConfig(max_response_length=200), EvaluateConfig(samples=1, k=1)
    settings = EvaluationSettings(data=data, config=config, seed=0)
    problems = {"test": pd.DataFrame(arithmetic_rows(4))}
    evaluation.answer_problems({"warm_start": candidate, "rl": candidate}, problems, settings)


DOORS: dict[str, Callable[..., object]] = {
    "main_ppo": command(
        main_ppo.main, "prompts", "data.train_batch_size=4", "data.max_response_length=200"
    ),
    "main_sft": command(main_sft.main, "sft"),
    "main_preference": command(main_preference.main, "pairs"),
    "main_preference kto": command(main_preference.main, "pairs", "preference.loss=kto"),
    "main_reward_model": command(main_reward_model.main, "pairs"),
    "main_reward_model likelihood": command(
        main_reward_model.main, "pairs", "reward_model.head=likelihood"
    ),
    "main_reward_model token": command(main_reward_model.main, "steps", "reward_model.head=token"),
    "Trainer.from_hf_config": from_hf_config,
    "RLTrainer": trainer_of_folder,
    "RLTrainer of actor_model": compat_trainer,
    "evaluate": evaluate,
    "rollouts for pairs": rollouts_for_pairs,
    "stage dataset": dataset_stage,
    "stages of sft": sft_stage,
    "stage preference": preference_stage,
    "stage reward_model": reward_model_stage,
    "stages of evaluate_only": evaluate_only,
    "serve": lambda place: NativeBackend.load(place.model, None),
    "HybridActor": lambda place: HybridActor.from_pretrained(place.model),
}
EVERY = tuple(DOORS)
SAMPLING = ("main_ppo", "Trainer.from_hf_config", "RLTrainer", "RLTrainer of actor_model")
SAMPLING += ("evaluate", "rollouts for pairs", "stage dataset", "stages of evaluate_only")
PAIRS = ("main_preference", "main_reward_model", "main_reward_model likelihood", "stage preference")
PAIRS += ("stage reward_model",)
ENDING = ("main_sft", "main_preference", "main_preference kto", "main_reward_model likelihood")
ENDING += ("stages of sft", "stage preference", "evaluate", "serve", "stages of evaluate_only")
INPUTS: dict[str, tuple[Callable[[Place], None], tuple[str, ...], str]] = {
    "foreign tokenizer": (
        foreign_tokenizer,
        EVERY,
        r"the tokenizer has the token '.+' with id \d+, but the model in \S+ has an embedding of "
        r"\d+; use the tokenizer that belongs to the model, or resize the embedding",
    ),
    "no weights": (
        no_weights,
        EVERY,
        r"\S+='\S+' has no weights \(model\.safetensors\); save the model there with "
        r"model\.save_pretrained\(folder\)",
    ),
    "no tokenizer": (
        no_tokenizer,
        tuple(door for door in EVERY if door != "HybridActor"),  # which may do without
        r"folder \S+ has no tokenizer \(no tokenizer\.json or tokenizer\.model\); save one there "
        r"with tokenizer\.save_pretrained, or give another folder",
    ),
    "no end token": (
        no_end_token,
        ENDING,
        r"(sft_train, row 0: )?the tokenizer '\S+' has no end token; set eos_token in its "
        r"tokenizer_config\.json",
    ),
    "short context": (
        short_context,
        SAMPLING,
        r"the longest prompt has \d+ tokens and data\.max_response_length=\d+, together more than "
        r"the model's context of 200; lower data\.max_response_length, .*",
    ),
    "equal once encoded": (
        equal_once_encoded,
        PAIRS,
        r"\S+, row \d+: 'chosen' and 'rejected' are the same tokens, which tells nothing apart; "
        r"remove it",
    ),
}


@pytest.mark.parametrize(
    ("bad", "door"), [(bad, door) for bad, (_, doors, _) in INPUTS.items() for door in doors]
)
def test_a_bad_input_gets_its_sentence_at_every_door(
    bad: str, door: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, _, sentence = INPUTS[bad]
    make(place)
    with pytest.raises(EngineError) as refused:
        DOORS[door](*([place, capsys] if door.startswith("main_") else [place]))
    assert re.fullmatch(sentence, str(refused.value)), refused.value


# What has token ids instead of rows.

GOOD, BEYOND = [5, 6, 7], [5, 999]
OFFLINE: dict[str, tuple[Any, Any, Callable[[list[int]], Any]]] = {
    "SFTTrainer": (
        SFTTrainer,
        SFTConfig(threads=1),
        lambda ids: training_examples.SFTExample(GOOD, ids),
    ),
    "PreferenceTrainer": (
        preference_learning.PreferenceTrainer,
        PreferenceTrainingConfig(threads=1),
        lambda ids: training_examples.PairExample(GOOD, ids, [5, 7]),
    ),
    "RewardModelTrainer": (
        preference_learning.RewardModelTrainer,
        RewardModelTrainingConfig(threads=1),
        lambda ids: training_examples.PairExample(GOOD, [5, 7], ids),
    ),
    "LikelihoodRewardTrainer": (
        preference_learning.LikelihoodRewardTrainer,
        RewardModelTrainingConfig(threads=1, head="likelihood"),
        lambda ids: training_examples.PairExample(ids, [5, 7], [5, 8]),
    ),
    "ProcessRewardTrainer": (
        preference_learning.ProcessRewardTrainer,
        RewardModelTrainingConfig(threads=1, head="token"),
        lambda ids: training_examples.StepExample(GOOD, ids, [0], [True]),
    ),
}
OUTSIDE = r"has token id 999 outside the model's vocabulary of 97; use the tokenizer the model was"


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize("split", ["training", "held-out"])
def test_examples_with_foreign_tokens_are_refused(name: str, split: str) -> None:
    kind, config, example = OFFLINE[name]
    trainer = kind(tiny_model("qwen2"), 0, config, seed=0)
    splits = [[example(GOOD)], [example(GOOD), example(BEYOND)]]
    with pytest.raises(ModelError, match=f"^{split} example 1 {OUTSIDE}"):
        trainer.fit(*(splits[::-1] if split == "training" else splits))


def test_prompts_with_foreign_tokens_are_refused() -> None:
    actor = HybridActor(tiny_model("qwen2"))
    with pytest.raises(ModelError, match=OUTSIDE):
        actor.generate(torch.tensor([BEYOND]), max_new_tokens=2)


@pytest.mark.parametrize("name", ["PreferenceTrainer", "RewardModelTrainer"])
def test_pairs_of_equal_responses_are_refused(name: str) -> None:
    kind, config, example = OFFLINE[name]
    with pytest.raises(EngineError, match=r"^training example 0: 'chosen' and 'rejected' are the"):
        kind(tiny_model("qwen2"), 0, config, seed=0).fit([example([5, 7])])


def test_an_example_whose_learned_values_are_too_few_is_refused() -> None:
    """As a conversation of two turns has, of which a caller marks the last alone."""
    rows = [training_examples.SFTExample(GOOD, [5, 6, 7, 8], [True, True])]
    with pytest.raises(DataError, match=r"^training example 0 has 2 values of 'learned' for 4 tok"):
        SFTTrainer(tiny_model("qwen2"), 0, SFTConfig(threads=1), seed=0).fit(rows)


def test_a_special_token_that_nothing_writes_may_lie_beyond_the_embedding(place: Place) -> None:
    """As that for images in Gemma 3's tokenizer, which its text models have no row for."""
    vocabulary = vocabulary_and_context(place.model)[0]
    tokenizer = load_tokenizer(place.model)
    image = AddedToken("<image>", special=True, normalized=False)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|user|>", "<|assistant|>", image]}
    )
    while len(tokenizer) <= vocabulary:
        tokenizer.add_tokens([AddedToken(f"<{len(tokenizer)}>", special=True)])
    check_vocabulary(vocabulary, tokenizer, "here")
    tokenizer.chat_template += "<image>"
    tokenizer.chat_template += f"<{len(tokenizer) - 1}>"
    with pytest.raises(ModelError, match="with id"):
        check_vocabulary(vocabulary, tokenizer, "here")
