"""The promote task against a real registry: who becomes champion, and when nobody does.

The rules one by one are in tests/engine/promotion; here they meet artifacts, MLflow and retries.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from flytekit.types.directory import FlyteDirectory

import tasks.promote
from engine.config import DataConfig, EvaluateConfig, GuardConfig, ModelConfig, PromoteConfig
from engine.data.sources import load_splits
from engine.data.tokenizer import train_tokenizer
from engine.evaluation.evaluate import evaluate_model
from engine.evaluation.summary import summarise
from engine.models import build_model, save_model
from engine.promotion import Champions
from engine.storage.artifacts import publish, staging
from engine.storage.manifest import Draft, read_manifest
from engine.tracking import Tracker
from tasks.context import RunContext, StageError
from tasks.evaluate import comparable_settings, evaluate
from tasks.finalize import open_promotion
from tasks.inputs import RLHFConfig
from tasks.preprocess import SPLITS
from tasks.promote import promote, waits_for_approval

SHAPE = ModelConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
EVALUATE = EvaluateConfig(samples=1, k=1, bootstrap_samples=200)
NAME = "hybridflyte-policy"


@dataclass
class Bench:
    """Artifacts as the stages before `promote` make them, with evaluations of our choice."""

    data: DataConfig
    dataset: Path
    folder: Path = Path()  # the last promotion's artifact

    def model(self, seed: int, mlflow_run: str = "") -> Path:
        """Publish a model of its own, made in an MLflow run or, as fetched ones, in none."""
        rows = pd.read_parquet(self.dataset / "test.parquet")
        texts = [message["content"] for prompt in rows["prompt"] for message in prompt]
        tokenizer = train_tokenizer(texts, 300)
        with staging("rl") as folder:
            save_model(build_model(SHAPE, tokenizer, seed), tokenizer, folder)
            draft = Draft(kind="rl", config={"seed": seed}, mlflow_run=mlflow_run)
            return publish(folder, draft)

    def evaluation(
        self, model: Path, correct: int, length: float = 4.0, recorded: bool = True
    ) -> Path:
        """Publish an evaluation in which the first `correct` greedy answers are right.

        length: tokens of each response.
        recorded: whether it says which budget of tokens it was made with.
        """
        test = pd.read_parquet(self.dataset / "test.parquet")
        before = evaluate_model(
            model, test, "warm_start", EVALUATE, max_response_length=4, seed=0
        ).assign(greedy_correct=False)
        before = before.assign(response_length=4.0)
        after = before.assign(
            model="rl",
            greedy_correct=[i < correct for i in range(len(test))],
            response_length=length,
        )
        comparison = summarise(before, after, 1, 0.95, 200, 0)
        with staging("evaluation") as folder:
            before.to_parquet(folder / "rows_warm_start.parquet", index=False)
            after.to_parquet(folder / "rows_rl.parquet", index=False)
            (folder / "comparison.json").write_text(comparison.to_json())
            parents = tuple(
                read_manifest(artifact).as_parent(name, artifact)
                for name, artifact in (("dataset", self.dataset), ("policy", model))
            )
            settings = comparable_settings(self.data, EVALUATE)
            if not recorded:
                del settings["data"]
            return publish(folder, Draft(kind="evaluation", parents=parents, config=settings))

    def promote(
        self,
        model: Path,
        evaluation: Path,
        config: PromoteConfig = PromoteConfig(),  # noqa: B008 (frozen)
        approved_by: str = "",
    ) -> dict[str, Any]:
        """Run the task in a run of its own; return its decision."""
        return self.promote_in(new_run(), model, evaluation, config, approved_by)

    def promote_in(
        self,
        run: RunContext,
        model: Path,
        evaluation: Path,
        config: PromoteConfig = PromoteConfig(),  # noqa: B008 (frozen)
        approved_by: str = "",
    ) -> dict[str, Any]:
        folder = promote(
            run=run,
            dataset=FlyteDirectory(str(self.dataset)),
            policy=FlyteDirectory(str(model)),
            evaluation=FlyteDirectory(str(evaluation)),
            data=self.data,
            evaluate=EVALUATE,
            config=config,
            seed=0,
            approved_by=approved_by,
        )
        self.folder = Path(folder.path)
        decision: dict[str, Any] = json.loads((Path(folder.path) / "decision.json").read_text())
        return decision


def new_run() -> RunContext:
    return RunContext(
        run_id=uuid.uuid4().hex, mlflow_run=Tracker().start_pipeline("p"),
        experiment="hybridflyte", started_at=time.time(),
    )  # fmt: skip


def champion() -> str | None:
    found = Tracker().champion(NAME, "champion")
    return found.tags["artifact_digest"] if found else None


def digest(artifact: Path) -> str:
    return read_manifest(artifact).digest


@pytest.fixture
def bench(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    torch.set_num_threads(1)
    shutil.copy(mlflow_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "hybridflyte"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with contextlib.chdir(tmp_path):
        yield make_bench(seed=0)


def make_bench(seed: int) -> Bench:
    data = DataConfig(
        sft_size=8, train_size=8, validation_size=4, test_size=40, max_response_length=4
    )
    splits = load_splits(data, seed)
    with staging("dataset") as folder:
        for name in SPLITS:
            getattr(splits, name).to_parquet(folder / f"{name}.parquet", index=False)
        return Bench(data, publish(folder, Draft(kind="dataset", config={"seed": seed})))


@pytest.fixture
def reigning(bench: Bench) -> Path:
    """A champion that solves 20 of 40 problems."""
    model = bench.model(seed=1)
    assert bench.promote(model, bench.evaluation(model, 20))["promoted"] is True
    assert champion() == digest(model)
    return model


def test_a_worse_model_is_not_promoted_and_told_why(bench: Bench, reigning: Path) -> None:
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 10))
    assert decision["promoted"] is False
    assert decision["gain"][0] == pytest.approx(-0.25)
    assert "lower end must be above" in decision["reason"]
    assert champion() == digest(reigning)


def test_an_equal_model_is_not_promoted(bench: Bench, reigning: Path) -> None:
    model = bench.model(seed=2)
    assert bench.promote(model, bench.evaluation(model, 20))["promoted"] is False
    assert champion() == digest(reigning)


def test_a_better_model_takes_the_alias(bench: Bench, reigning: Path) -> None:
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 36))
    assert decision["promoted"] is True
    assert decision["gain"][0] == pytest.approx(0.4)
    assert decision["previous_champion"] != decision["model_version"]
    assert champion() == digest(model)


def test_promoting_twice_changes_nothing(bench: Bench, reigning: Path) -> None:
    again = bench.promote(reigning, bench.evaluation(reigning, 20))
    assert again["promoted"] is False
    assert "is the champion already" in again["reason"]
    assert again["model_version"] == again["previous_champion"]
    assert champion() == digest(reigning)


def test_a_champion_of_other_problems_is_evaluated_on_these(
    bench: Bench, reigning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_bench(seed=5)
    model = other.model(seed=2)
    decision = other.promote(model, other.evaluation(model, 12))
    assert "evaluating the champion" in capsys.readouterr().out
    # Its weights are random, so on these problems it solves none, whatever it did on its own.
    assert decision["gain"][0] == pytest.approx(12 / 40)
    assert decision["promoted"] is True


def test_a_champion_with_a_spoilt_evaluation_is_evaluated_anew(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    first = bench.model(seed=1)
    evidence = bench.evaluation(first, 20)
    bench.promote(first, evidence)
    spoil(evidence)
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 12))
    assert "recorded evaluation can't be used" in capsys.readouterr().out
    assert decision["gain"][0] == pytest.approx(12 / 40)


def longer(bench: Bench) -> Bench:
    """The same problems, answered with a larger budget of tokens."""
    return replace(bench, data=bench.data.model_copy(update={"max_response_length": 8}))


def test_a_champion_of_another_budget_of_tokens_is_evaluated_under_this_one(
    bench: Bench, reigning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = longer(bench)
    model = other.model(seed=2)
    decision = other.promote(model, other.evaluation(model, 12))
    assert "evaluating the champion" in capsys.readouterr().out
    assert decision["gain"][0] == pytest.approx(12 / 40), "not 20 of 40 with fewer tokens"
    lengths = pd.read_parquet(other.folder / "rows_champion.parquet")["greedy_length"]
    assert lengths.max() > 4


def test_a_champion_whose_evaluation_has_no_record_of_its_budget_is_evaluated_anew(
    bench: Bench, reigning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = bench.evaluation(reigning, 20, recorded=False)
    client = Tracker().client
    client.set_model_version_tag(NAME, "1", "evaluation_uri", str(old))
    client.set_model_version_tag(NAME, "1", "evaluation_manifest", read_manifest(old).own_digest)
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 12))
    assert "has no record of its settings 'data'" in capsys.readouterr().out
    assert decision["gain"][0] == pytest.approx(12 / 40)


def test_an_evaluation_with_other_settings_than_the_promotion_promotes_nobody(
    bench: Bench, reigning: Path
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    said = r"data.max_response_length is {}, and the evaluation \w+ was made with 4; give"
    with pytest.raises(StageError, match=said.format(8)):
        longer(bench).promote(model, evidence)
    with pytest.raises(
        StageError, match=r"has no record of its settings 'data'.* evaluate the mod"
    ):
        bench.promote(model, bench.evaluation(model, 36, recorded=False))
    assert champion() == digest(reigning)
    given = {
        "dataset": FlyteDirectory(str(bench.dataset)),
        "policy": FlyteDirectory(str(model)),
        "evaluation": FlyteDirectory(str(evidence)),
        "seed": 0,
    }
    with pytest.raises(StageError, match=said.format(64)):
        open_promotion(config=RLHFConfig(), **given)
    with pytest.raises(StageError, match=r"evaluate\.\w+ is .* was made with"):
        open_promotion(config=RLHFConfig(data=bench.data), **given)
    same = RLHFConfig(data=bench.data, evaluate=EVALUATE)
    assert open_promotion(config=same, **given).evaluate == EVALUATE


def test_the_evaluation_of_a_run_records_what_it_is_compared_by(bench: Bench) -> None:
    model = bench.model(seed=1)
    output = evaluate["laptop"](
        run=new_run(),
        dataset=FlyteDirectory(str(bench.dataset)),
        warm_start=FlyteDirectory(str(model)),
        policy=FlyteDirectory(str(model)),
        data=bench.data,
        config=EVALUATE,
        seed=0,
    )
    config = read_manifest(output.path).config
    assert config == {**comparable_settings(bench.data, EVALUATE), "seed": 0}
    assert config["data"] == {"max_response_length": 4}
    assert bench.promote(model, Path(output.path))["promoted"], "the first needs no gain"


def copy_of(version: str) -> Path:
    """Where MLflow keeps a version's files."""
    return Path(Tracker().model_version(f"models:/{NAME}/{version}").source.removeprefix("file://"))


def test_a_champion_whose_copy_in_mlflow_was_replaced_is_not_compared_with(
    bench: Bench, reigning: Path
) -> None:
    shutil.rmtree(copy_of("1"))
    shutil.copytree(bench.model(seed=3), copy_of("1"))
    said = r"champion can't be compared with: .* where its tag artifact_digest says .*rollback"
    model, other = bench.model(seed=2), make_bench(seed=5)
    with pytest.raises(StageError, match=said):
        bench.promote(model, bench.evaluation(model, 36))
    with pytest.raises(StageError, match=said):  # where it would be evaluated now
        other.promote(model, other.evaluation(model, 36))
    assert champion() == digest(reigning)
    Champions(Tracker(), NAME).rollback("the champion's files were replaced", to="2")
    assert champion() == digest(model)


def test_a_champion_that_nothing_is_recorded_of_is_not_compared_with(bench: Bench) -> None:
    client = Tracker().client
    client.create_registered_model(NAME)
    client.create_model_version(NAME, str(bench.model(seed=3)))
    client.set_registered_model_alias(NAME, "champion", "1")
    model = bench.model(seed=2)
    with pytest.raises(StageError, match=r"version 1 has no tag artifact_digest .* was moved"):
        bench.promote(model, bench.evaluation(model, 36))
    assert champion_version() == "1"


def champion_version() -> str | None:
    found = Tracker().champion(NAME)
    return found.version if found else None


def stage_of(run_id: str) -> str:
    """Where MLflow has a run: `active`, or `deleted`, in its trash."""
    return str(Tracker().client.get_run(run_id).info.lifecycle_stage)


def test_asked_twice_or_tried_again_a_promotion_leaves_the_model_out_of_the_trash(
    bench: Bench,
) -> None:
    rules, run, model = PromoteConfig(approval="required"), new_run(), bench.model(seed=1)
    evidence = bench.evaluation(model, 20)
    assert not bench.promote_in(run, model, evidence, rules)["promoted"]
    first = bench.folder
    assert bench.promote_in(run, model, evidence, rules, "ada")["promoted"]
    for asked in (first, bench.folder):
        assert stage_of(read_manifest(asked).mlflow_run) == "active"
    assert bench.promote_in(run, model, evidence, rules, "ada")["promoted"]
    reigning = Tracker().champion(NAME)
    assert reigning is not None
    assert reigning.run_id == run.mlflow_run
    assert stage_of(reigning.run_id) == "active"


def test_a_model_of_an_attempt_that_was_lost_is_registered_under_a_run_that_stays(
    bench: Bench,
) -> None:
    tracker, run = Tracker(), new_run()
    with tracker.stage("rl", run.mlflow_run) as lost:
        model = bench.model(seed=1, mlflow_run=lost.run_id)
    with tracker.stage("rl", run.mlflow_run):
        pass  # the next attempt; it makes the same, and the artifact that is there stays
    assert stage_of(lost.run_id) == "deleted"
    assert bench.promote_in(run, model, bench.evaluation(model, 20))["promoted"]
    assert tracker.model_version(f"models:/{NAME}/1").run_id == run.mlflow_run


def spoil(evidence: Path) -> None:
    rows = pd.read_parquet(evidence / "rows_rl.parquet").assign(greedy_correct=True)
    rows.to_parquet(evidence / "rows_rl.parquet", index=False)


def lose_a_file(evidence: Path) -> None:
    (evidence / "comparison.json").unlink()


def lose_the_manifest(evidence: Path) -> None:
    (evidence / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [spoil, lose_a_file, lose_the_manifest])
def test_tampered_evidence_promotes_nobody(
    bench: Bench, reigning: Path, damage: Callable[[Path], None]
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    damage(evidence)
    with pytest.raises(StageError):
        bench.promote(model, evidence)
    assert champion() == digest(reigning)
    assert list((Path.cwd() / "hybridflyte" / ".staging").glob("*")) == []


def test_an_unreachable_registry_promotes_nobody(
    bench: Bench, reigning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    run = RunContext(run_id="r", mlflow_run="x", experiment="hybridflyte", started_at=0.0)
    uri = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        started = time.monotonic()
        with pytest.raises(StageError, match="MLFLOW_TRACKING_URI"):
            bench.promote_in(run, model, evidence)
        assert time.monotonic() - started < 30
    found = Tracker(uri=uri).champion(NAME, "champion")
    assert found is not None
    assert found.tags["artifact_digest"] == digest(reigning)


def test_the_artifact_holds_the_decision_its_evidence_and_its_parents(
    bench: Bench, reigning: Path
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    decision = bench.promote(model, evidence)
    manifest = read_manifest(bench.folder)
    parents = {parent.name: parent.digest for parent in manifest.parents}
    assert parents.pop("champion_evaluation")
    assert parents == {
        "dataset": digest(bench.dataset),
        "policy": digest(model),
        "evaluation": digest(evidence),
        "champion": digest(reigning),
    }
    assert manifest.config["promote"] == PromoteConfig().model_dump(mode="json")
    measured = json.loads((bench.folder / "evidence.json").read_text())
    assert [measured["gain"][end] for end in ("mean", "low", "high")] == decision["gain"]
    assert [(o["rule"], o["passed"]) for o in decision["outcomes"]] == [
        ("gain", True), ("contamination", True),
    ]  # fmt: skip


def test_a_retry_after_the_alias_moved_says_the_same(bench: Bench, reigning: Path) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    run = RunContext(
        run_id="one", mlflow_run=Tracker().start_pipeline("p"), experiment="hybridflyte",
        started_at=0.0,
    )  # fmt: skip
    first = bench.promote_in(run, model, evidence)
    assert bench.promote_in(run, model, evidence) == first
    moves = Champions(Tracker(), NAME).history()
    assert [(m.version, m.replaced) for m in moves] == [("1", None), ("2", "1")]
    assert moves[-1].reason == first["reason"]


def test_a_champion_that_came_during_the_evaluation_stays(
    bench: Bench, reigning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival, model = bench.model(seed=3), bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    rivals = bench.promote(rival, bench.evaluation(rival, 0))["model_version"]
    compare = tasks.promote.compare_and_decide

    def slow(*arguments: Any) -> Any:
        """Decide; meanwhile somebody else promotes."""
        decided = compare(*arguments)
        Champions(Tracker(), NAME).promote(rivals, "1", "a rival", request="rival", by="ada")
        return decided

    monkeypatch.setattr(tasks.promote, "compare_and_decide", slow)
    with pytest.raises(StageError, match=r"on version 2 now, .* by ada: a rival"):
        bench.promote(model, evidence)
    assert champion() == digest(rival)
    monkeypatch.setattr(tasks.promote, "compare_and_decide", compare)
    assert bench.promote(model, evidence)["previous_champion"] == rivals


def test_longer_answers_and_a_regression_are_not_promoted(bench: Bench, reigning: Path) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36, length=9.0)
    rules = PromoteConfig(
        max_length_ratio=2.0, max_kl=0.1, guards=(GuardConfig(data_source="nowhere"),)
    )
    decision = bench.promote(model, evidence, rules)
    assert decision["promoted"] is False
    assert [o["rule"] for o in decision["outcomes"] if not o["passed"]] == [
        "guard pass_at_1 of nowhere", "kl", "length",
    ]  # fmt: skip
    assert "2.25 [2.25, 2.25] times as long" in decision["reason"]
    assert decision["reason"].count("is not in the evidence") == 2
    assert champion() == digest(reigning)


def test_training_on_the_test_is_found_in_all_that_the_model_descends_from(
    bench: Bench, reigning: Path
) -> None:
    with staging("dataset") as folder:
        pd.read_parquet(bench.dataset / "test.parquet").to_parquet(folder / "train.parquet")
        leak = publish(folder, Draft(kind="dataset"))
    other = bench.model(seed=2)
    with staging("rl") as folder:
        shutil.copytree(other, folder, dirs_exist_ok=True)
        (folder / "manifest.json").unlink()
        parent = read_manifest(leak).as_parent("dataset", leak)
        model = publish(folder, Draft(kind="rl", parents=(parent,)))
    decision = bench.promote(model, bench.evaluation(model, 36))
    assert decision["promoted"] is False
    assert "100.00% of the test prompts were trained on" in decision["reason"]


def test_an_approval_is_waited_for_and_then_taken(bench: Bench, reigning: Path) -> None:
    rules = PromoteConfig(approval="required")
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    assert bench.promote(model, evidence, rules)["reason"].endswith("a person's approval.")
    assert waits_for_approval(promotion=FlyteDirectory(str(bench.folder))) is True
    assert champion() == digest(reigning)
    decision = bench.promote(model, evidence, rules, approved_by="ada")
    assert "approved by ada" in decision["reason"]
    assert waits_for_approval(promotion=FlyteDirectory(str(bench.folder))) is False
    assert champion() == digest(model)
    assert Champions(Tracker(), NAME).history()[-1].by == "ada"
    worse = bench.model(seed=3)
    bench.promote(worse, bench.evaluation(worse, 0), rules)
    assert waits_for_approval(promotion=FlyteDirectory(str(bench.folder))) is False


def test_an_evaluation_of_another_model_promotes_nobody(bench: Bench, reigning: Path) -> None:
    model, other = bench.model(seed=2), bench.model(seed=3)
    with pytest.raises(StageError, match=r"the evaluation .* is of policy"):
        bench.promote(model, bench.evaluation(other, 36))
    assert champion() == digest(reigning)


def test_a_rewritten_ancestor_promotes_nobody(bench: Bench, reigning: Path) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    words = json.loads((model / "manifest.json").read_text())
    words["metrics"] = {"reward": 1.0}
    (model / "manifest.json").write_text(json.dumps(words))
    with pytest.raises(StageError, match=r"not as recorded: .*manifest.json .*nothing was moved"):
        bench.promote(model, evidence)
    assert champion() == digest(reigning)
