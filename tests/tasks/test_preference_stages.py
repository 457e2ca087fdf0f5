"""The stages of preference learning, one after the other: what each writes, and from what."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from flytekit.types.directory import FlyteDirectory
from promotion_bench import SHAPE, new_run

from engine.config import (
    DataConfig,
    LoRAConfig,
    PairsConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLConfig,
    SFTConfig,
)
from engine.config.pipeline import RewardModelGateConfig
from engine.data.contract import PREFERENCE_PAIRS, check
from engine.lineage.lookup import review
from engine.models.policy import open_critic_model
from engine.preferences import by_reward_model
from engine.rewards.model_based import likelihood, reward_model
from engine.stages.preferences import reference_settings
from engine.stages.settings import (
    DatasetSettings,
    PairsSettings,
    PreferenceSettings,
    RewardModelGateSettings,
    RewardModelSettings,
    SFTSettings,
)
from engine.storage.artifacts import Manifest, read_manifest, verify
from engine.tracking import Tracker
from engine.trainers.preference_learning import PreferenceTrainer
from tasks.host import StageError
from tasks.stages import (
    pairs_stage,
    preference_training_stage,
    preprocess,
    reference_log_probs_stage,
    reward_model_promotion_stage,
    reward_model_training_stage,
    sft_stage,
)

DATA = DataConfig(
    sft_size=64, train_size=16, validation_size=8, test_size=16, max_response_length=32
)
PAIRS = PairsConfig.model_validate(
    {"n": 6, "reward": {"name": "test_preference_stages:digit_share", "isolation": "none"}}
)
TRAINING: dict[str, Any] = {"max_steps": 2, "train_batch_size": 8, "threads": 1}
LEARNING = PreferenceTrainingConfig.model_validate(TRAINING)


def digit_share(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    """What random text differs in: the share of its characters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def always_one(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


@dataclass(frozen=True)
class Stages:
    """Folders of the artifacts."""

    dataset: Path
    policy: Path
    pairs: Path
    reference: Path


def folder(output: Any) -> Path:
    return Path(str(output.path))


def given(path: Path) -> FlyteDirectory:
    return FlyteDirectory(str(path))


def make_pairs(
    dataset: Path, policy: Path, config: PairsConfig = PAIRS, kind: str = "pairs"
) -> Path:
    return folder(
        pairs_stage(
            run=new_run(),
            settings=PairsSettings(
                data=DATA,
                config=config,
                source_digest="f" * 64 if config.path else "",
                kind=kind,
                seed=0,
            ),
            dataset=given(dataset),
            policy=given(policy),
        )
    )


def on_pairs(
    stages: Stages, pairs: Path, config: PreferenceTrainingConfig, **inputs: Any
) -> dict[str, Any]:
    """The inputs of both stages that train on pairs."""
    settings = PreferenceSettings(
        config=config, lora=LoRAConfig(), dtype="", too_long="fail", seed=0
    )
    return {
        "run": new_run(),
        "settings": settings,
        "pairs": given(pairs),
        "policy": given(stages.policy),
        **inputs,
    }


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("place")
    shutil.copy(mlflow_store, folder / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setenv("HOME", str(folder))
        patch.setenv("HYBRIDFLYTE_HOME", str(folder / "hybridflyte"))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        yield


@pytest.fixture(scope="module")
def stages(place: None) -> Stages:
    run = new_run()
    prepare: Callable[..., Any] = preprocess.task_function
    settings = DatasetSettings(
        data=DATA, source_digest="", model_path="", model_digest="", context=512, seed=0
    )
    dataset = folder(prepare(run=run, settings=settings).dataset)
    warm_start = SFTConfig.model_validate(TRAINING | {"max_steps": 60, "optim": {"lr": 2e-2}})
    policy = folder(
        sft_stage(
            run=run,
            settings=SFTSettings(start=SHAPE, start_digest="", config=warm_start, seed=0),
            dataset=given(dataset),
        )
    )
    pairs = make_pairs(dataset, policy)
    stages = Stages(dataset, policy, pairs, Path())
    config = reference_settings(LEARNING)
    reference = folder(reference_log_probs_stage(**on_pairs(stages, pairs, config=config)))
    return Stages(dataset, policy, pairs, reference)


def parents(manifest: Manifest) -> dict[str, str]:
    return {parent.name: parent.kind for parent in manifest.parents}


def test_from_rollouts_to_a_policy_and_a_reward_model(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = read_manifest(stages.pairs)
    assert parents(made) == {"dataset": "dataset", "policy": "sft"}
    assert made.parents[1].digest == read_manifest(stages.policy).digest
    train = pd.read_parquet(stages.pairs / "train.parquet")
    check(train, PREFERENCE_PAIRS, "train")
    assert len(train) == made.metrics["rows_train"] == 16 - made.metrics["prompts_without_pair"] > 4
    scores = pd.DataFrame(list(train["extra_info"]))
    assert (scores["chosen_score"] > scores["rejected_score"]).all()
    assert (stages.pairs / "README.md").read_text().count("rollouts of the policy") == 1

    scorer = train_scorer(stages, head="likelihood")
    judged = read_manifest(scorer)
    assert 0 <= judged.metrics["reward_model/validation_accuracy_low"] <= 1
    reward = by_reward_model(RLConfig(), str(scorer)).reward.components["reward_model"]
    assert reward.name == "likelihood"
    assert likelihood(["2+2?"], ["4"], **reward.options)[0] < 0

    # The reference's log-probs are there, so training computes none.
    monkeypatch.setattr(PreferenceTrainer, "_response_log_probs", None)
    before = {path.name for path in stages.reference.iterdir()}
    config = LEARNING.model_copy(update={"validate_every": 100, "beta": 0.3})
    empty = without_held_out(stages.pairs, stages.pairs.parent / "trained only on")
    inputs = on_pairs(stages, empty, config, reference=given(stages.reference))
    policy = folder(preference_training_stage(**inputs))
    found = read_manifest(policy)
    assert parents(found) == {"pairs": "pairs", "policy": "sft", "reference": "reference"}
    assert pd.read_parquet(policy / "metrics.parquet")["preference/loss"].notna().all()
    assert {path.name for path in stages.reference.iterdir()} == before
    verify(stages.reference)
    assert not (policy / "scratch").exists()

    scorer = train_scorer(stages)
    judged = read_manifest(scorer)
    assert parents(judged) == {"pairs": "pairs", "policy": "sft"}
    assert 0 <= judged.metrics["reward_model/validation_accuracy_low"] <= 1
    assert len(reward_model(["2+2?"], ["4"], model=str(scorer))) == 1
    assert open_critic_model(scorer, "float32") is not None

    check_the_gate(stages, scorer, judged)


def check_the_gate(stages: Stages, scorer: Path, made: Manifest) -> None:
    """The rules are in tests/engine/promotion; here they meet artifacts and the registry."""
    name, accuracy = "hybridflyte-reward-model", made.metrics["reward_model/validation_accuracy"]
    declined = promote(stages, scorer, minimum_accuracy=0.99)
    assert declined["promoted"] is False
    assert declined["accuracy"][0] == accuracy, "the reward ranks as the trainer did"
    assert Tracker().champion(name) is None

    taken = promote(stages, scorer, minimum_accuracy=0.0)
    assert (taken["promoted"], taken["model_version"]) == (accuracy > 0, declined["model_version"])
    graph = review([f"models:/{name}@champion"]).graph
    assert {"dataset", "pairs", "reward_model", "sft"} <= {n.kind for n in graph.nodes.values()}

    assert "is the champion already" in promote(stages, scorer)["reason"]
    other = train_scorer(stages, head="likelihood")
    beside = promote(stages, other, minimum_accuracy=0.0)
    assert beside["previous_champion"] == taken["model_version"]
    low, champion = beside["gain"][1], Tracker().champion(name)
    assert beside["promoted"] is (low > 0 and beside["accuracy"][1] > 0)
    assert champion is not None
    assert (champion.version == beside["model_version"]) is beside["promoted"]

    with (other / "metrics.parquet").open("ab") as file:
        file.write(b"0")
    with pytest.raises(StageError, match="is not as recorded"):
        promote(stages, other, minimum_accuracy=0.0, minimum_gain=-1.0)


def promote(stages: Stages, scorer: Path, **rules: Any) -> dict[str, Any]:
    """The gate's decision on a reward model of the pairs."""
    done = reward_model_promotion_stage(
        run=new_run(),
        settings=RewardModelGateSettings(
            config=RewardModelGateConfig.model_validate({"minimum_pairs": 1} | rules), seed=0
        ),
        pairs=given(stages.pairs),
        reward_model=given(scorer),
    )
    decision: dict[str, Any] = json.loads((folder(done) / "decision.json").read_text())
    return decision


def train_scorer(stages: Stages, **changes: Any) -> Path:
    """A reward model of the pairs."""
    return folder(
        reward_model_training_stage(
            run=new_run(),
            settings=RewardModelSettings(
                config=RewardModelTrainingConfig.model_validate(TRAINING | changes),
                dtype="",
                too_long="fail",
                seed=0,
            ),
            pairs=given(stages.pairs),
            policy=given(stages.policy),
        )
    )


def without_held_out(pairs: Path, copy: Path) -> Path:
    """The training pairs alone: validation computes log-probs, of the policy."""
    shutil.copytree(pairs, copy)
    held_out = pd.read_parquet(copy / "validation.parquet")
    held_out[:0].to_parquet(copy / "validation.parquet", index=False)
    return copy


def test_kto_learns_from_labels_of_files(stages: Stages, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Say {i}.", "completion": str(i + i % 2), "label": i % 2 == 0}
        for i in range(24)
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PairsConfig(path=str(tmp_path / "labels.jsonl"), validation_size=4)
    made = make_pairs(stages.dataset, stages.policy, config, "labels")
    assert parents(read_manifest(made)) == {"dataset": "dataset", "preferences": "source"}
    kto = PreferenceTrainingConfig.model_validate(TRAINING | {"loss": "kto"})
    asked = on_pairs(stages, made, config=reference_settings(kto))
    reference = folder(reference_log_probs_stage(**asked))
    trained = on_pairs(stages, made, config=kto, reference=given(reference))
    found = read_manifest(folder(preference_training_stage(**trained)))
    assert "preference/validation_loss" in found.metrics


def test_a_policy_whose_completions_are_all_alike(stages: Stages) -> None:
    reward = {"name": "test_preference_stages:always_one", "isolation": "none"}
    config = PairsConfig.model_validate({"n": 2, "reward": reward})
    with pytest.raises(
        StageError, match=r"no prompt of 16 has two completions whose rewards differ"
    ):
        make_pairs(stages.dataset, stages.policy, config)


def test_the_reference_depends_on_neither_loss_nor_learning_rate() -> None:
    one = PreferenceTrainingConfig.model_validate({"loss": "ipo", "beta": 0.1, "optim": {"lr": 1}})
    assert reference_settings(one) == reference_settings(
        LEARNING.model_copy(update={"max_steps": 0, "threads": 0})
    )
    simpo = PreferenceTrainingConfig(loss="simpo")
    assert reference_settings(simpo).loss == "simpo"
    assert reference_settings(PreferenceTrainingConfig(loss="kto")).loss == "kto"
