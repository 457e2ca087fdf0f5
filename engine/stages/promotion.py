"""Stages `promote` and `rollback`: move the champion's alias forward or back."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from engine.console import display_path, say
from engine.errors import TrackingError
from engine.evaluation.comparability import require_same_settings
from engine.promotion.champions import (
    Champions,
    check_evidence,
    require_intact_copy,
    require_unmodified,
)
from engine.promotion.gate import (
    Evaluated,
    champion_evaluation,
    decide_and_move,
    judged_sets,
    measure,
)
from engine.promotion.rules import Decision, decide_on_sets
from engine.stages.fetch import first_model
from engine.stages.settings import PromotionSettings, RunContext
from engine.stages.stage import Artifact, Stage, host, shared, show_facts, stage
from engine.storage.artifacts import Draft, Parent, publish, read_manifest, staging
from engine.tracking import Tracker
from engine.tracking.model_versions import ModelVersion, version_parent

CHAMPION_ROWS = "rows_champion.parquet"


def promote(
    run: RunContext,
    settings: PromotionSettings,
    dataset: Artifact,
    policy: Artifact,
    evaluation: Artifact,
    approved_by: str = "",
) -> Artifact:
    """Register the RL model; make it champion if it beats the present one on the same problems.

    Artifact `promotion`: `decision.json` (promoted or not, why, each rule's outcome, against which
    champion), `evidence.json`, and `rows_champion.parquet` where the champion was evaluated here.
    The rules are `engine.promotion.rules`. Anything missing, unreadable or tampered with promotes
    nothing. Running it again for the same model changes nothing.

    approved_by: who approved, for `promote.approval=required`; without it such a promotion waits.
    """
    config = settings.config
    recorded = {"promote": config.model_dump(mode="json"), "seed": settings.seed}
    # The call after approval is another stage, not a retry of the first.
    with stage("promotion", run, recorded, "approved" if approved_by else "") as this:
        test = this.load_parent("dataset", dataset)
        model = this.load_parent("policy", policy)
        evidence = this.load_parent("evaluation", evaluation)
        check_evidence(test, model, evidence)
        manifest = read_manifest(evidence)
        require_same_settings(manifest, settings.data, settings.evaluate, settings.seed)
        datasets = require_unmodified([this.parents[1].uri, this.parents[2].uri])
        tracker = Tracker(experiment=run.experiment)
        version = register_model(tracker, this, model, run, config.model_name)
        require_intact_copy(tracker, version)
        champions = Champions(tracker, config.model_name, config.alias)
        champions.record_approval_rule(config.approval)
        case = PromotionCase(this, test, model, evidence, datasets, settings, approved_by)
        comparison = pass_gate(case, tracker, champions, version, run.run_id)
        former = comparison.former
        parents = [comparison.recorded, version_parent(former, "champion") if former else None]
        this.parents += [parent for parent in parents if parent is not None]
        facts = {
            "gain": comparison.gain,
            "evaluation_digest": manifest.digest,
            "waits_for_approval": comparison.decision.waits_for_approval,
        }
        decision = comparison.decision
        return publish_decision(this, version, former, decision, config.alias, facts)


def publish_decision(
    this: Stage,
    version: ModelVersion,
    former: ModelVersion | None,
    decision: Decision,
    alias: str,
    facts: Mapping[str, object],
) -> Artifact:
    """Write `decision.json` with the champion that it was made against, and publish the artifact.

    facts: what else it holds of this kind of model.
    """
    record: dict[str, object] = {
        "promoted": decision.promote,
        "reason": decision.reason,
        "model_name": version.name,
        "model_version": version.version,
        "alias": alias,
        "previous_champion": former.version if former else None,
        **facts,
    }
    this.tracked.set_tags({key: str(value) for key, value in record.items()})
    text = json.dumps({**record, "outcomes": decision.to_dict()["outcomes"]}, indent=2)
    (this.folder / "decision.json").write_text(text)
    show_facts("Decision", record)
    return this.publish({"promoted": float(decision.promote)})


def read_decision(promotion: Artifact) -> dict[str, Any]:
    """Return `decision.json` of an artifact `promotion`."""
    decision: dict[str, Any] = json.loads((promotion.local() / "decision.json").read_text())
    return decision


def approval_request(promotion: Artifact) -> str:
    """Say what a person is asked to approve."""
    decision = read_decision(promotion)
    rules = "; ".join(outcome["sentence"] for outcome in decision["outcomes"])
    return (
        f"make {decision['model_name']} version {decision['model_version']} the "
        f"{decision['alias']} in place of version {decision['previous_champion'] or 'none'}: "
        f"{rules}"
    )


@dataclass(frozen=True, slots=True)
class PromotionCase:
    """The inputs of one promotion decision."""

    this: Stage
    dataset: Path
    policy: Path
    evaluation: Path
    datasets: list[Path]  # all that the model descends from
    settings: PromotionSettings
    approved_by: str  # empty: nobody


@dataclass(frozen=True, slots=True)
class Comparison:
    """A decision, and the champion that it was made against."""

    former: ModelVersion | None  # the champion; None: there was none
    decision: Decision
    gain: list[float] | None = None  # mean and ends of the interval
    recorded: Parent | None = None  # the champion's evaluation, where it was there already


def register_model(
    tracker: Tracker, this: Stage, model: Path, run: RunContext, name: str
) -> ModelVersion:
    """Register the model as a version tagged with its origin; once for the same content.

    Its files go to the MLflow run that made it. Where that is unknown or deleted (a lost attempt),
    they go to the pipeline's run, which every retry shares.
    """
    policy, evidence = this.parents[1], this.parents[2]
    tags = {
        "artifact_uri": policy.uri,
        "evaluation_uri": evidence.uri,
        "evaluation_manifest": evidence.manifest,
        "hybridflyte.run": run.run_id,
        "flyte.execution": this.execution,
    }
    owner = tracker.active_run(read_manifest(model).mlflow_run, run.mlflow_run)
    number = tracker.register_model(model, name, owner, tags)
    return tracker.model_version(f"models:/{name}/{number}")


def pass_gate(
    case: PromotionCase, tracker: Tracker, champions: Champions, version: ModelVersion, run_id: str
) -> Comparison:
    """Decide against the present champion, and move the alias if the rules allow."""
    comparisons: list[Comparison] = []

    def judge(former: ModelVersion | None) -> Decision:
        comparisons.append(compare_and_decide(case, tracker, former))
        return comparisons[-1].decision

    decision, former = decide_and_move(
        tracker,
        champions,
        version,
        judge,
        request=f"{run_id}:{read_manifest(case.policy).digest[:16]}",
        by=case.approved_by or run_id,
        approved_by=case.approved_by,
        notify=lambda text: say(f"promotion: {text}"),
    )
    if comparisons and comparisons[-1].decision is decision:
        return comparisons[-1]
    return Comparison(former, decision)  # it is the champion already


def compare_and_decide(
    case: PromotionCase, tracker: Tracker, former: ModelVersion | None
) -> Comparison:
    """Compare the new model with the champion (without one, the warm start), and decide."""
    settings, scratch = case.settings, case.this.folder.parent
    evidence = read_manifest(case.evaluation)
    after = pd.read_parquet(case.evaluation / "rows_rl.parquet")
    against: Literal["champion", "warm_start", "start_model"]
    against = "champion" if former else first_model(evidence.parents)
    if former is None:
        before, recorded = pd.read_parquet(case.evaluation / "rows_warm_start.parquet"), None
    else:
        evaluated = Evaluated(
            case.dataset, after, evidence, settings.data, settings.evaluate, settings.seed
        )
        before, recorded = champion_evaluation(
            tracker,
            former,
            settings.config.alias,
            evaluated,
            scratch=scratch,
            notify=lambda text: say(f"promotion: {text}"),
        )
    rows = case.this.folder / CHAMPION_ROWS
    rows.unlink(missing_ok=True)  # of a decision that is made again
    if former is not None and recorded is None:
        before.to_parquet(rows, index=False)
    names = ["test", *(extra.name for extra in settings.data.evaluation_sets)]
    sets = {
        name: measure(
            before,
            after,
            against,
            dataset=name,
            policy=case.policy,
            datasets=case.datasets,
            rules=settings.config,
            evaluate=settings.evaluate,
            seed=settings.seed,
            approved_by=case.approved_by,
        )
        for name in judged_sets(after, settings.config.dataset, names)
    }
    # The set that decides: the one with the least certain gain.
    name = min(sets, key=lambda name: gain.low if (gain := sets[name].gain) else -math.inf)
    written = asdict(sets[name]) | {"dataset": name}
    if len(sets) > 1:
        written["sets"] = {name: asdict(measured) for name, measured in sets.items()}
    text = json.dumps(written, indent=2, sort_keys=True)
    (case.this.folder / "evidence.json").write_text(text)
    gain = sets[name].gain
    interval = [gain.mean, gain.low, gain.high] if gain is not None else None
    return Comparison(former, decide_on_sets(sets, settings.config), interval, recorded)


def rollback(
    model_name: str,
    reason: str,
    to: str = "",
    expected: str = "",
    alias: str = "champion",
    forced: bool = False,
    approved_by: str = "",
    request: str = "",
) -> Artifact:
    """Move the alias back to the previous champion, or to a given version.

    Artifact `rollback`: `rollback.json`, the move with its reason; its parents are the restored
    model and the replaced one. `python -m engine.promotion rollback` does the same.

    `to` (empty: the one that the present champion replaced) is restored, if `expected` (empty: any)
    is the champion now. `forced` takes `to` even if it never was champion, which is recorded.
    `approved_by` agrees, where approval is required and the version has none. A second call with
    the same `request` (empty: the execution) changes nothing.
    """
    execution = host().execution
    request = request or execution or f"local-{uuid.uuid4().hex[:12]}"
    tracker = Tracker()
    move = Champions(tracker, model_name, alias).rollback(
        reason,
        to=to,
        expected=expected,
        request=request,
        by=execution or "local",
        force=forced,
        approved_by=approved_by,
    )
    say(f"rollback: {model_name} {alias}: {move.sentence()}")
    show_facts("Rollback", {"model": model_name, "alias": alias, "move": move.sentence()})
    parents: list[Parent] = []
    for name, version in (("restored", move.version), ("left", move.replaced)):
        if version is not None:
            try:
                moved = tracker.model_version(f"models:/{model_name}/{version}")
                parents += filter(None, [version_parent(moved, name)])
            except TrackingError as error:
                # The alias has moved by now; a record without this parent is better than none.
                say(f"rollback: {error}")
    with staging("rollback") as folder:
        (folder / "rollback.json").write_text(
            json.dumps({"model_name": model_name, "alias": alias, **asdict(move)}, indent=2)
        )
        settings = {"model_name": model_name, "alias": alias, "to": to, "reason": reason}
        draft = Draft(
            kind="rollback", parents=tuple(parents), config=settings, flyte_execution=execution
        )
        path = publish(folder, draft)
    say(f"rollback: done → {display_path(path)}")
    return shared(path)
