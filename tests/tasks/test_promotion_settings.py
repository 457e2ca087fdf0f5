"""Models are compared on the same problems under the same settings, or evaluated again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from flytekit.types.directory import FlyteDirectory
from promotion_bench import EVALUATE, NAME, Bench, champion, digest, make_bench, new_run, spoil

import engine.storage.artifacts
from engine.config import PromoteConfig
from engine.evaluation.comparability import comparable_settings, incomparable
from engine.promotion.champions import Champions
from engine.stages.settings import EvaluationSettings
from engine.storage.artifacts import read_manifest
from engine.tracking import Tracker
from tasks.host import StageError
from tasks.inputs import RLHFConfig
from tasks.stages import evaluate_stage, plan_promotion


def test_a_champion_of_other_problems_is_evaluated_on_these(
    bench: Bench, current_champion: Path, capsys: pytest.CaptureFixture[str]
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
    bench: Bench, current_champion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = longer(bench)
    model = other.model(seed=2)
    decision = other.promote(model, other.evaluation(model, 12))
    assert "evaluating the champion" in capsys.readouterr().out
    assert decision["gain"][0] == pytest.approx(12 / 40), "not 20 of 40 with fewer tokens"
    lengths = pd.read_parquet(other.folder / "rows_champion.parquet")["greedy_length"]
    assert lengths.max() > 4


def test_a_champion_whose_evaluation_has_no_record_of_its_budget_is_evaluated_anew(
    bench: Bench, current_champion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(bench.evaluation(current_champion, 20, recorded=False))
    model = bench.model(seed=2)
    decision = bench.promote(model, bench.evaluation(model, 12))
    assert "has no record of its settings 'data'" in capsys.readouterr().out
    assert decision["gain"][0] == pytest.approx(12 / 40)


def record(evidence: Path) -> None:
    """Make this the recorded evaluation of version 1."""
    client, own = Tracker().client, read_manifest(evidence).own_digest
    client.set_model_version_tag(NAME, "1", "evaluation_uri", str(evidence))
    client.set_model_version_tag(NAME, "1", "evaluation_manifest", own)


def test_a_champion_judged_by_another_seed_scorer_or_code_is_evaluated_anew(
    bench: Bench,
    current_champion: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = bench.model(seed=2)
    evidence = bench.evaluation(model, 36)
    with monkeypatch.context() as before:
        before.setattr(engine.storage.artifacts, "sources_digest", lambda: "0" * 64)
        record(bench.evaluation(current_champion, 20, changed={"seed": 1, "scorer": "judge"}))
        old = bench.evaluation(model, 35)
    decision = bench.promote(model, evidence)
    said = "it differs from the new model's in scorer, seed, the code"
    assert said in " ".join(capsys.readouterr().out.split())
    assert decision["gain"][0] == pytest.approx(36 / 40), "not 16 of 40 by another measure"
    Champions(Tracker(), NAME).rollback("judged again")
    with pytest.raises(StageError, match=r"made by other code .* evaluate the model again"):
        bench.promote(model, old)
    assert champion() == digest(current_champion)


def test_what_two_evaluations_must_share(bench: Bench) -> None:
    one = read_manifest(bench.evaluation(bench.model(seed=1), 20))
    assert incomparable(one, one) == []
    asked = one.config["evaluate"]
    for key, value, said in (
        ("seed", 1, "seed"),
        ("scorer", "judge", "scorer"),
        ("data", {"max_response_length": 8}, "data.max_response_length"),
        ("evaluate", {**asked, "temperature": 0.5}, "evaluate.temperature"),
        ("evaluate", {**asked, "engine": "vllm"}, "evaluate.engine"),
    ):
        other = one.model_copy(update={"config": {**one.config, key: value}})
        assert incomparable(one, other) == [said]
    assert incomparable(one, one.model_copy(update={"sources_digest": "0"})) == ["the code"]


def test_an_evaluation_with_other_settings_than_the_promotion_promotes_nobody(
    bench: Bench, current_champion: Path
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
    assert champion() == digest(current_champion)
    given = {
        "dataset": FlyteDirectory(str(bench.dataset)),
        "policy": FlyteDirectory(str(model)),
        "evaluation": FlyteDirectory(str(evidence)),
        "seed": 0,
        "profile": "laptop",
    }
    with pytest.raises(StageError, match=said.format(64)):
        plan_promotion(config=RLHFConfig(), **given)
    with pytest.raises(StageError, match=r"evaluate\.\w+ is .* was made with"):
        plan_promotion(config=RLHFConfig(data=bench.data), **given)
    same = RLHFConfig(data=bench.data, evaluate=EVALUATE)
    with pytest.raises(StageError, match=r"seed is 1, and the evaluation \w+ was made with 0"):
        plan_promotion(config=same, **{**given, "seed": 1})
    assert plan_promotion(config=same, **given).promotion.evaluate.scorer == EVALUATE.scorer
    stricter = RLHFConfig(data=bench.data, evaluate=EVALUATE, rl={"reward": {"name": "math"}})
    with pytest.raises(StageError, match=r"scorer is 'math', .* was made with 'answer_match'"):
        plan_promotion(config=stricter, **given)


def test_the_evaluation_of_a_run_records_what_it_is_compared_by(bench: Bench) -> None:
    model = bench.model(seed=1)
    output = evaluate_stage(
        run=new_run(),
        dataset=FlyteDirectory(str(bench.dataset)),
        warm_start=FlyteDirectory(str(model)),
        policy=FlyteDirectory(str(model)),
        settings=EvaluationSettings(data=bench.data, config=EVALUATE, seed=0),
    ).evaluation
    config = read_manifest(output.path).config
    assert config == comparable_settings(bench.data, EVALUATE, 0)
    assert (config["seed"], config["scorer"]) == (0, "answer_match")
    assert config["data"] == {"max_response_length": 4}
    rules = PromoteConfig(bootstrap=True)
    assert bench.promote(model, Path(output.path), rules)["promoted"]
