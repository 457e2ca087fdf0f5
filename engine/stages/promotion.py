"""Stages that move a champion's alias: `promote`, `reward_model_promotion` and `rollback`."""

import json
import math
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from engine.config import LineageConfig, PromoteConfig
from engine.config.pipeline import RewardModelGateConfig
from engine.console import display_path, say
from engine.errors import LineageError, TrackingError
from engine.evaluation.comparability import require_same_settings
from engine.evaluation.results import read_rows, require_problems
from engine.evaluation.summary import read_problems
from engine.promotion import champions, gate
from engine.promotion.champions import Champions
from engine.promotion.recheck import recheck
from engine.promotion.rules import Decision, decide_on_sets, decision_of, with_reward_audit
from engine.stages.fetch import first_model
from engine.stages.settings import PromotionSettings, RewardModelGateSettings, RunContext
from engine.stages.stage import Artifact, Stage, host, shared, show_facts, stage
from engine.storage import signatures
from engine.storage.artifacts import Draft, Parent, publish, read_manifest, staging
from engine.tracking import Tracker
from engine.tracking.model_versions import ModelVersion, intact_copy, version_parent
from engine.tracking.runs import RUN_TAG

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
    Anything missing, unreadable or tampered with promotes nothing. Running it again for the same
    model changes nothing. approved_by: who approved, where `promote.approval=required`.
    """
    config = settings.config
    recorded = {"promote": config.model_dump(mode="json"), "seed": settings.seed}
    # The call after approval is another stage, not a retry of the first.
    key = "approved" if approved_by else ""
    with stage("promotion", run, recorded, attempt_key=key) as this:
        test = this.load_parent("dataset", dataset)
        model = this.load_parent("policy", policy)
        evidence = this.load_parent("evaluation", evaluation)
        manifest = gate.check_evidence(test, model, evidence)
        require_same_settings(manifest, settings.data, settings.evaluate, settings.seed)
        source, judged_by = this.parent("policy"), this.parent("evaluation")
        trusted = trusted_keys(settings.lineage)
        datasets = gate.require_unmodified([source.uri, judged_by.uri], trusted)
        tags = {"evaluation_uri": judged_by.uri, "evaluation_manifest": judged_by.manifest}
        given = len(this.parents)

        def judge(tracker: Tracker, former: ModelVersion | None) -> Decision:
            decision, recorded = compare_and_decide(
                this, settings, datasets, trusted, tracker, former, approved_by
            )
            this.parents[given:] = [recorded] if recorded else []
            return with_reward_audit(decision, manifest.config, config)

        def facts(decision: Decision) -> dict[str, object]:
            if not decision.outcomes:  # it is champion already, and was compared with nothing
                del this.parents[given:]
            gains = [o.value for o in decision.outcomes if o.rule.split(" on ")[0] == "gain"]
            lows = [value[1] if isinstance(value, list) else -math.inf for value in gains]
            return {
                "gain": gains[lows.index(min(lows))] if gains else None,  # the least certain
                "evaluation_digest": manifest.digest,
                "waits_for_approval": decision.waits_for_approval,
            }

        return decide(this, run, source, config, tags, judge, facts, trusted, approved_by)


def trusted_keys(config: LineageConfig) -> frozenset[str] | None:
    """Return the public keys by one of which all must be signed; None where it need not be."""
    return signatures.trusted_keys(config.public_keys) if config.require_signatures else None


def compare_and_decide(
    this: Stage,
    settings: PromotionSettings,
    datasets: list[Path],
    trusted: Collection[str] | None,
    tracker: Tracker,
    champion: ModelVersion | None,
    approved_by: str,
) -> tuple[Decision, Parent | None]:
    """Compare with the champion, or the warm start; return an earlier evaluation of it, too."""
    folder, evaluate, rules = this.inputs["evaluation"], settings.evaluate, settings.config
    manifest, after = read_manifest(folder), read_rows(folder, "rl")
    problems = read_problems(this.inputs["dataset"])
    require_problems(after, problems, f"rows_rl.parquet of the evaluation {manifest.digest[:12]}")
    new = gate.Evaluated(
        this.inputs["policy"], this.inputs["dataset"], after, manifest, settings.data, evaluate,
        settings.seed,
    )  # fmt: skip
    champion_rows = this.folder / CHAMPION_ROWS
    champion_rows.unlink(missing_ok=True)  # of a decision that is made again
    recorded: Parent | None = None
    against: Literal["champion", "warm_start", "start_model"] = "champion"
    if champion is None:
        against = first_model(manifest.parents)
        if not rules.bootstrap:
            gate.require_own_start(read_manifest(new.policy), manifest)
        before = read_rows(folder, "warm_start")
    else:
        before, recorded = gate.champion_evaluation(
            tracker, champion, rules.alias, new, scratch=this.folder.parent, trusted=trusted
        )
        if recorded is None:
            before.to_parquet(champion_rows, index=False)
    sets = {
        name: gate.measure(new, before, against, name, datasets, rules, approved_by)
        for name in gate.judged_sets(new, rules.dataset)
    }
    # The set that decides: the one with the least certain gain.
    name = min(sets, key=lambda name: gain.low if (gain := sets[name].gain) else -math.inf)
    written = asdict(sets[name]) | {"dataset": name}
    if len(sets) > 1:
        written["sets"] = {name: asdict(measured) for name, measured in sets.items()}
    decision = decide_on_sets(sets, rules)
    if decision.promote and rules.recheck.problems:
        judged = set(sets).union(*([g.dataset] if g.dataset else problems for g in rules.guards))
        outcome, written["recheck"] = recheck(
            new,
            # A champion that was evaluated just now has answered already.
            before if champion is None or recorded is not None else None,
            {name: rows for name, rows in problems.items() if name in judged},
            rules.recheck,
            tracker,
            champion,
            scratch=this.folder.parent,
        )
        decision = decision_of([*decision.outcomes, outcome])
    (this.folder / "evidence.json").write_text(json.dumps(written, indent=2, sort_keys=True))
    return decision, recorded


def reward_model_promotion(
    run: RunContext, settings: RewardModelGateSettings, pairs: Artifact, reward_model: Artifact
) -> Artifact:
    """Register the reward model; make it champion if it ranks held-out pairs by the rules.

    Artifact `reward_model_promotion`: `decision.json` as of `promote`, and `rows.parquet`, a row a
    held-out pair with who ranked it right. The rules are `engine.promotion.gate`'s.
    """
    config = settings.config
    recorded = {"reward_model_gate": config.model_dump(mode="json"), "seed": settings.seed}
    with stage("reward_model_promotion", run, recorded) as this:
        held_out = pd.read_parquet(this.load_parent("pairs", pairs) / "validation.parquet")
        model = this.load_parent("reward_model", reward_model)
        pairs_parent, source = this.parent("pairs"), this.parent("reward_model")
        trained_on = {p.name: p.digest for p in read_manifest(model).parents}.get("pairs")
        if trained_on != pairs_parent.digest:
            raise LineageError(
                f"the reward model {source.digest[:12]} was trained on pairs "
                f"{str(trained_on)[:12]}, and pairs={pairs_parent.digest[:12]} were given; give "
                "the artifacts of one run"
            )
        trusted = trusted_keys(settings.lineage)
        gate.require_unmodified([source.uri], trusted)
        from engine.preferences import ranked_right  # torch, which no policy's promotion needs

        right = ranked_right(model, held_out)

        def judge(tracker: Tracker, former: ModelVersion | None) -> Decision:
            """Write who ranked which held-out pair right, and decide."""
            table, before = held_out[["chosen", "rejected"]].assign(right=right), None
            if former is not None:
                gate.require_intact_champion(tracker, former, config.alias, trusted)
                with tempfile.TemporaryDirectory(dir=this.folder.parent) as scratch:
                    before = ranked_right(intact_copy(tracker, former, Path(scratch)), held_out)
                table = table.assign(champion_right=before)
            table.to_parquet(this.folder / "rows.parquet", index=False)
            return gate.decide_reward_model(right, before, config)

        def facts(decision: Decision) -> dict[str, object]:
            measured = {outcome.rule: outcome.value for outcome in decision.outcomes}
            figures = {rule: measured.get(rule) for rule in ("accuracy", "gain")}
            return {**figures, "held_out_pairs": len(held_out)}

        tags = {"pairs_uri": pairs_parent.uri}
        return decide(this, run, source, config, tags, judge, facts, trusted)


def decide(
    this: Stage,
    run: RunContext,
    source: Parent,
    config: PromoteConfig | RewardModelGateConfig,
    tags: Mapping[str, object],
    judge: Callable[[Tracker, ModelVersion | None], Decision],
    facts: Callable[[Decision], Mapping[str, object]],
    trusted: Collection[str] | None,
    approved_by: str = "",
) -> Artifact:
    """Register a model, move the alias where `judge` says so, and publish `decision.json`.

    The same content is registered once, in the MLflow run that made it, or where that is unknown or
    deleted, in the pipeline's. source: the model, a parent of the stage. facts: what its kind's
    decision holds besides. trusted: the public keys by which MLflow's copy must be signed, if any.
    """
    tracker = Tracker(experiment=run.experiment)
    model, name = this.inputs[source.name], config.model_name
    owner = tracker.active_run(read_manifest(model).mlflow_run, run.mlflow_run)
    origin = {RUN_TAG: run.run_id, "flyte.execution": this.execution}
    tags = {"artifact_uri": source.uri, **tags, **origin}
    number = tracker.register_model(model, name, owner, tags)
    version = tracker.model_version(f"models:/{name}/{number}")
    champions.require_intact_copy(tracker, version, trusted)
    registered = Champions(tracker, name, config.alias)
    if isinstance(config, PromoteConfig):
        registered.record_approval_rule(config.approval)
    decision, former = gate.decide_and_move(
        tracker,
        registered,
        version,
        partial(judge, tracker),
        request=f"{run.run_id}:{source.digest[:16]}",
        by=approved_by or run.run_id,
        approved_by=approved_by,
        notify=lambda text: say(f"{this.kind}: {text}"),
    )
    record = {
        "promoted": decision.promote,
        "reason": decision.reason,
        "model_name": name,
        "model_version": version.version,
        "alias": config.alias,
        "previous_champion": former.version if former else None,
        **facts(decision),
    }
    champion = version_parent(former, "champion") if former else None
    if champion is not None and champion.digest != source.digest:
        this.parents.append(champion)
    this.tracked.set_tags({key: str(value) for key, value in record.items()})
    text = json.dumps({**record, "outcomes": decision.to_dict()["outcomes"]}, indent=2)
    (this.folder / "decision.json").write_text(text)
    show_facts("Decision", record)
    return this.publish({"promoted": float(decision.promote)})


def read_decision(folder: Path) -> dict[str, Any]:
    """Return `decision.json` of a promotion's folder."""
    return json.loads((folder / "decision.json").read_text())


def waits_for_approval(promotion: Artifact) -> bool:
    """Return whether a promotion lacks only approval."""
    return bool(read_decision(promotion.local())["waits_for_approval"])


def approval_request(promotion: Artifact) -> str:
    """Say what a person is asked to approve."""
    decision = read_decision(promotion.local())
    rules = "; ".join(outcome["sentence"] for outcome in decision["outcomes"])
    return (
        f"make {decision['model_name']} version {decision['model_version']} the "
        f"{decision['alias']} in place of version {decision['previous_champion'] or 'none'}: "
        f"{rules}"
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
) -> Artifact:
    """Move the alias back to the previous champion, or to the version `to`.

    Artifact `rollback`: `rollback.json`, the move with its reason; its parents are the restored
    model and the replaced one. It needs `expected` (empty: any) to be the champion. `forced` takes
    a `to` that never was one. `approved_by` agrees, where the version has no approval that it
    needs. A second call with the same `request` (empty: the execution) changes nothing.
    """
    execution = host().execution
    request = request or execution or f"local-{uuid.uuid4().hex[:12]}"
    tracker = Tracker()
    options: dict[str, Any] = {"expected": expected, "force": forced, "approved_by": approved_by}
    options |= {"request": request, "by": execution or "local"}
    move = Champions(tracker, model_name, alias).rollback(reason, to=to, **options)
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
