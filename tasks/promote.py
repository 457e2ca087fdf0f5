"""Tasks `promote` and `rollback`: move the champion's alias forward or back."""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flytekit import current_context, task
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, EvaluateConfig, PromoteConfig
from engine.console import display_path
from tasks.context import (
    IMAGE,
    LARGE,
    SHORT,
    SMALL,
    RunContext,
    as_output,
    echo,
    local_artifact,
    on_cluster,
    user_facing_errors,
)
from tasks.fetch import first_model
from tasks.flytekit_setup import with_secrets
from tasks.stage import DECK, Stage, show_facts, stage
from tasks.variants import on_profiles

if TYPE_CHECKING:
    from engine.promotion import Champions, Decision
    from engine.storage.artifacts import Parent
    from engine.tracking import Tracker
    from engine.tracking.model_versions import ModelVersion


# Task `promote`: registers the model and moves the champion's alias, if the evidence allows.
#
# Artifact `promotion`: `decision.json` (promoted or not, why, each rule's outcome, against which
# champion), `evidence.json`, and `rows_champion.parquet` where the champion was evaluated here.
# The
# rules are `engine.promotion.rules`. Anything missing, unreadable or tampered with promotes
# nothing.
# Not cached: the champion may have changed. Running it again for the same model changes nothing.

CHAMPION_ROWS = "rows_champion.parquet"


# Not interruptible: it may be moving an alias. Running it again changes nothing. On the profile's
# machine, as it may have to evaluate the champion.
@on_profiles(cache=False, requests=LARGE, retries=2, timeout=timedelta(hours=6), **DECK)
def promote(
    run: RunContext,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    data: DataConfig,
    evaluate: EvaluateConfig,
    config: PromoteConfig,
    seed: int,
    approved_by: str = "",
) -> FlyteDirectory:
    """Register the RL model; make it champion if it beats the present one on the same problems.

    approved_by: who approved, for `promote.approval=required`; without it such a promotion waits.
    """
    from engine.evaluation.comparability import require_same_settings
    from engine.promotion import Champions
    from engine.promotion.champions import check_evidence, require_intact_copy, require_unmodified
    from engine.storage.artifacts import read_manifest
    from engine.tracking import Tracker

    settings = {"promote": config.model_dump(mode="json"), "seed": seed}
    # The call after approval is another stage, not a retry of the first.
    with stage("promotion", run, settings, "approved" if approved_by else "") as this:
        test = this.load_parent("dataset", dataset)
        model = this.load_parent("policy", policy)
        evidence = this.load_parent("evaluation", evaluation)
        check_evidence(test, model, evidence)
        require_same_settings(read_manifest(evidence), data, evaluate, seed)
        datasets = require_unmodified([this.parents[1].uri, this.parents[2].uri])
        tracker = Tracker(experiment=run.experiment)
        version = register_model(tracker, this, model, run, config.model_name)
        require_intact_copy(tracker, version)
        champions = Champions(tracker, config.model_name, config.alias)
        champions.record_approval_rule(config.approval)
        case = PromotionCase(
            this, test, model, evidence, datasets, data, evaluate, config, seed, approved_by
        )
        comparison = pass_gate(case, tracker, champions, version, run.run_id)
        return publish_decision(case, version, comparison)


@task(**SHORT)
def waits_for_approval(promotion: FlyteDirectory) -> bool:
    """Whether a promotion lacks only a person's approval: the condition of a workflow branch."""
    with user_facing_errors():
        decision = json.loads((local_artifact(promotion) / "decision.json").read_text())
        return bool(decision["waits_for_approval"])


@task(**SHORT)
def keep_promotion(promotion: FlyteDirectory) -> FlyteDirectory:
    """Return a promotion as it is, for the workflow branch without approval."""
    with user_facing_errors():
        return as_output(local_artifact(promotion))


@task(**SHORT)
def approval_request(promotion: FlyteDirectory) -> str:
    """What a person is asked to approve, as Flyte's console shows it."""
    with user_facing_errors():
        decision = json.loads((local_artifact(promotion) / "decision.json").read_text())
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
    data: DataConfig
    evaluate: EvaluateConfig
    config: PromoteConfig
    seed: int
    approved_by: str  # empty: nobody


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was decided against which champion."""

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
    from engine.storage.artifacts import read_manifest

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
    from engine.promotion.gate import decide_and_move
    from engine.storage.artifacts import read_manifest

    made: list[Comparison] = []

    def judge(former: ModelVersion | None) -> Decision:
        made.append(compare_and_decide(case, tracker, former))
        return made[-1].decision

    decision, former = decide_and_move(
        tracker,
        champions,
        version,
        judge,
        request=f"{run_id}:{read_manifest(case.policy).digest[:16]}",
        by=case.approved_by or run_id,
        approved_by=case.approved_by,
        notify=lambda text: echo(f"promotion: {text}"),
    )
    if made and made[-1].decision is decision:
        return made[-1]
    return Comparison(former, decision)  # it is the champion already


def compare_and_decide(
    case: PromotionCase, tracker: Tracker, former: ModelVersion | None
) -> Comparison:
    """Compare the new model with the champion (without one, the warm start), and decide."""
    import pandas as pd

    from engine.promotion import decide_on_sets
    from engine.promotion.gate import Evaluated, champion_evaluation, judged_sets, measure
    from engine.storage.artifacts import read_manifest

    after = pd.read_parquet(case.evaluation / "rows_rl.parquet")
    began = first_model(read_manifest(case.evaluation).parents)
    against: Literal["champion", "warm_start", "start_model"] = "champion" if former else began
    if former is None:
        before, recorded = pd.read_parquet(case.evaluation / "rows_warm_start.parquet"), None
    else:
        champion = champion_evaluation(
            tracker,
            former,
            case.config.alias,
            Evaluated(
                case.dataset,
                after,
                read_manifest(case.evaluation),
                case.data,
                case.evaluate,
                case.seed,
            ),
            scratch=case.this.folder.parent,
            notify=lambda text: echo(f"promotion: {text}"),
        )
        before, recorded = champion.rows, champion.recorded
    rows = case.this.folder / CHAMPION_ROWS
    rows.unlink(missing_ok=True)  # of a decision that is made again
    if former is not None and recorded is None:
        before.to_parquet(rows, index=False)
    wanted = ["test", *(one.name for one in case.data.evaluation_sets)]
    sets = {
        name: measure(
            before,
            after,
            against,
            dataset=name,
            policy=case.policy,
            datasets=case.datasets,
            rules=case.config,
            evaluate=case.evaluate,
            seed=case.seed,
            approved_by=case.approved_by,
        )
        for name in judged_sets(after, case.config.dataset, wanted)
    }
    # The set that decides: the one with the least certain gain.
    name = min(sets, key=lambda name: gain.low if (gain := sets[name].gain) else -math.inf)
    evidence = sets[name].to_dict() | {"dataset": name}
    if len(sets) > 1:
        evidence["sets"] = {name: measured.to_dict() for name, measured in sets.items()}
    text = json.dumps(evidence, indent=2, sort_keys=True)
    (case.this.folder / "evidence.json").write_text(text)
    gain = sets[name].gain
    interval = [gain.mean, gain.low, gain.high] if gain is not None else None
    return Comparison(former, decide_on_sets(sets, case.config), interval, recorded)


def publish_decision(
    case: PromotionCase, version: ModelVersion, comparison: Comparison
) -> FlyteDirectory:
    """Write the decision with the champion that it was made against, and publish the artifact."""
    from engine.storage.artifacts import read_manifest
    from engine.tracking.model_versions import version_parent

    this, former, decision = case.this, comparison.former, comparison.decision
    parents = [comparison.recorded, version_parent(former, "champion") if former else None]
    this.parents += [parent for parent in parents if parent is not None]
    record: dict[str, Any] = {
        "promoted": decision.promote,
        "reason": decision.reason,
        "model_name": version.name,
        "model_version": version.version,
        "alias": case.config.alias,
        "previous_champion": former.version if former else None,
        "gain": comparison.gain,
        "evaluation_digest": read_manifest(case.evaluation).digest,
        "waits_for_approval": decision.waits_for_approval,
    }
    this.tracked.set_tags({k: str(v) for k, v in record.items()})
    text = json.dumps({**record, "outcomes": decision.to_dict()["outcomes"]}, indent=2)
    (this.folder / "decision.json").write_text(text)
    show_facts("Decision", record)
    return this.publish({"promoted": float(decision.promote)})


# Task `rollback`: moves the alias back to the previous champion, or to a given version.
#
# Artifact `rollback`: `rollback.json`, the move with its reason; its parents are the restored
# model
# and the replaced one. `python -m engine.promotion rollback` does the same.


@task(
    cache=False,
    requests=SMALL,
    container_image=IMAGE,
    **with_secrets(),
    retries=2,
    timeout=timedelta(hours=1),
    **DECK,
)
def rollback(
    model_name: str,
    reason: str,
    to: str = "",
    expected: str = "",
    alias: str = "champion",
    forced: bool = False,
    approved_by: str = "",
    request: str = "",
) -> FlyteDirectory:
    """Restore a champion.

    Args:
        model_name: The registered model.
        reason: Why; it is recorded.
        to: The version to restore; empty: the one that the present champion replaced.
        expected: Refuse unless this version is the champion; empty: whichever is.
        alias: The alias to move.
        forced: Take `to` even if it never was champion; recorded as forced, not as a rollback.
        approved_by: Who agrees, where approval is required and the version has none.
        request: A second call with this id changes nothing; empty: the Flyte execution.
    """
    from engine.promotion import Champions
    from engine.storage.artifacts import Draft, publish, staging
    from engine.tracking import Tracker

    with user_facing_errors():
        execution = current_context().execution_id.name if on_cluster() else ""
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
        echo(f"rollback: {model_name} {alias}: {move.sentence()}")
        show_facts("Rollback", {"model": model_name, "alias": alias, "move": move.sentence()})
        parents = [
            parent
            for name, version in (("restored", move.version), ("left", move.replaced))
            if version is not None
            for parent in parent_of_version(tracker, model_name, version, name)
        ]
        with staging("rollback") as folder:
            (folder / "rollback.json").write_text(
                json.dumps({"model_name": model_name, "alias": alias, **asdict(move)}, indent=2)
            )
            settings = {"model_name": model_name, "alias": alias, "to": to, "reason": reason}
            draft = Draft(
                kind="rollback",
                parents=tuple(parents),
                config=settings,
                flyte_execution=execution,
            )
            path = publish(folder, draft)
        echo(f"rollback: done → {display_path(path)}")
        return as_output(path)


def parent_of_version(tracker: Tracker, model: str, version: str, name: str) -> list[Parent]:
    """The artifact of a version as a parent; empty when the version or its tags are gone."""
    from engine.errors import TrackingError
    from engine.tracking.model_versions import version_parent

    try:
        parent = version_parent(tracker.model_version(f"models:/{model}/{version}"), name)
    except TrackingError as error:
        # The alias has moved by now; a record without this parent is better than none.
        echo(f"rollback: {error}")
        return []
    return [] if parent is None else [parent]
