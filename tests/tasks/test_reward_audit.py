"""The task before RL that audits scorers, and what evaluation and gate make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flytekit.types.directory import FlyteDirectory
from promotion_bench import EVALUATE, Bench, make_bench, new_run

from engine.config import PipelineConfig, RewardConfig
from engine.stages import plan
from engine.stages.profiles import LAPTOP, PROFILES
from engine.stages.reward_audit import FILE
from engine.stages.settings import EvaluationSettings, RewardAuditSettings
from engine.storage.artifacts import read_manifest
from tasks.host import StageError
from tasks.stages import evaluate, reward_audit

SOUND, WEAK = "audited_rewards:sound", "audited_rewards:contains"
MODULE = """
def sound(prompts, completions, *, ground_truth, **columns):
    pairs = zip(completions, ground_truth, strict=True)
    return [float(text.rpartition("####")[2].strip() == truth) for text, truth in pairs]


def contains(prompts, completions, *, ground_truth, **columns):
    return [float(truth in text) for text, truth in zip(completions, ground_truth, strict=True)]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "audited_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def reward(name: str) -> RewardConfig:
    return RewardConfig(name=name, isolation="none")


def audited(bench: Bench, required: bool = False, **names: str) -> Path:
    settings = RewardAuditSettings(
        rewards={who: reward(name) for who, name in names.items()},
        plugins=(),
        code=dict.fromkeys(names, ""),
        required=required,
    )
    dataset = FlyteDirectory(str(bench.dataset))
    made = reward_audit(LAPTOP, run=new_run(), settings=settings, dataset=dataset)
    return Path(str(made.path))


def evaluated(bench: Bench, audit: Path | None, name: str) -> Path:
    config = EVALUATE.model_copy(update={"reward": reward(name)})
    made = evaluate(
        LAPTOP,
        run=new_run(),
        settings=EvaluationSettings(data=bench.data, config=config, seed=0),
        dataset=FlyteDirectory(str(bench.dataset)),
        warm_start=FlyteDirectory(str(bench.model(seed=1))),
        policy=FlyteDirectory(str(bench.model(seed=2))),
        audit=None if audit is None else FlyteDirectory(str(audit)),
    )
    return Path(str(made.evaluation.path))


def test_an_evaluation_records_the_audit_and_shows_it(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = audited(bench, rl=WEAK, evaluation=SOUND)
    printed = capsys.readouterr().out
    assert "the run goes on, as promote.require_reward_audit is false (for example '" in printed
    assert "' counts as right where '" in printed
    found = json.loads((audit / FILE).read_text())
    assert [found[who]["passed"] for who in ("rl", "evaluation")] == [False, True]
    assert found["rl"]["rows"] == 16
    manifest = read_manifest(audit)
    assert manifest.metrics["passed"] == 0.0
    assert [parent.name for parent in manifest.parents] == ["dataset"]

    evaluation = evaluated(bench, audit, SOUND)
    recorded = read_manifest(evaluation)
    weak, sound = recorded.config["reward_audit"]  # type: ignore[misc]
    assert "buried truth" in weak["holes"]
    assert sound == {
        "scorer": recorded.config["scorer"],
        "passed": True,
        "rows": 16,
        "holes": [],
        "warnings": [],
    }
    assert read_manifest(audit).digest in {parent.digest for parent in recorded.parents}
    page = (evaluation / "report.html").read_text()
    assert "The scorer of rl can be fooled" in page
    assert "buried truth" in page
    assert "reward_audit" not in read_manifest(evaluated(bench, None, SOUND)).config


def test_an_audit_of_other_data_is_refused(bench: Bench) -> None:
    audit = audited(make_bench(seed=1), evaluation=SOUND)
    with pytest.raises(StageError, match=r"reward audit .* is of dataset"):
        evaluated(bench, audit, SOUND)


def test_rl_does_not_begin_with_holes_where_the_gate_asks_for_the_audit(bench: Bench) -> None:
    with pytest.raises(StageError, match=r"found holes .*rl: failed, holes: .*buried truth"):
        audited(bench, required=True, rl=WEAK, evaluation=SOUND)
    assert read_manifest(audited(bench, required=True, evaluation=SOUND)).metrics["holes"] == 0.0


def settings_of(**changes: Any) -> RewardAuditSettings:
    return plan.reward_audit_settings(
        plan.pin_named_content(PipelineConfig.model_validate(changes))
    )


def test_a_plan_names_the_scorers_and_their_code() -> None:
    assert list(settings_of().rewards) == ["evaluation"]
    made = settings_of(rl={"reward": SOUND}, evaluate={"reward": "answer_match"})
    assert set(made.rewards) == {"rl", "evaluation"}
    assert made.code["rl"]
    assert not made.code["evaluation"]
    assert settings_of(promote={"require_reward_audit": True}).required
    assert settings_of(rl={"actor": {"optim": {"lr": 1e-6}}}) == settings_of()


def test_a_model_that_scores_gets_the_profiles_machines() -> None:
    machines = PROFILES["8xA100"]
    assert plan.audit_profile(PipelineConfig(), machines) == LAPTOP
    scored = PipelineConfig.model_validate({"rl": {"reward": {"name": "reward_model"}}})
    assert plan.audit_profile(scored, machines) == machines
