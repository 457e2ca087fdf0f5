"""Tasks `report`, `review` and `finalize`: summaries and pages of a run for people."""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from engine.config import DataConfig, EvaluateConfig, PromoteConfig
from engine.console import display_path
from tasks.context import (
    IMAGE,
    SHORT,
    SMALL,
    RunContext,
    StageError,
    as_output,
    echo,
    execution_name,
    local_artifact,
    user_facing_errors,
)
from tasks.evaluate import run_folder, write_pages
from tasks.failure import set_current_run
from tasks.fetch import START_MODEL
from tasks.flytekit_setup import with_secrets
from tasks.inputs import RLHFConfig, pinned_evaluation
from tasks.plan import open_run
from tasks.profiles import Profile, read_profile
from tasks.stage import DECK, show_facts

# Task `report`: the run's summary, as `summary.json` in the run's folder and as a table; pages.
#
# It reads manifests, so a cached run reports the same facts. Not cached.

NEAR_ZERO = 0.02  # pass@1, a fraction
POLICY = "rl"  # the trained policy's key in the summary, whatever trained it
LEARNED_FROM = ("pairs", "reference", "reward_model")  # kinds of a policy's parents


@task(**SHORT, **DECK)
def report(
    run: RunContext,
    config_digest: str,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    promotion: FlyteDirectory,
) -> FlyteFile:
    """Write the run's pages and `summary.json`, end the MLflow parent run, print the summary."""
    with user_facing_errors():
        trained = local_artifact(policy)
        folders = {
            "dataset": local_artifact(dataset),
            "sft": local_artifact(warm_start),
            **made_before(trained),
            POLICY: trained,
            "evaluation": local_artifact(evaluation),
            "promotion": local_artifact(promotion),
        }
        facts = summarise(run, config_digest, folders)
        facts["report"] = str(write_pages(run, folders["promotion"]))
        path = write_summary(run, facts)
        finish_run(run, facts, path)
        print_summary(facts, path, folders)
    return FlyteFile(str(path))


def made_before(policy: Path) -> dict[str, Path]:
    """What the policy learned from besides the dataset and the warm start: pairs, reward model."""
    from engine.storage.artifacts import local_path, read_manifest

    found: dict[str, Path] = {}
    for parent in read_manifest(policy).parents:
        if parent.kind in LEARNED_FROM:
            folder = local_path(parent.uri)
            found |= made_before(folder) | {parent.kind: folder}
    return found


def summarise(run: RunContext, config_digest: str, folders: dict[str, Path]) -> dict[str, Any]:
    """Collect the run's facts from its artifacts."""
    from engine.evaluation.policy_steps import read_policy_steps
    from engine.storage.artifacts import read_manifest
    from tasks.evaluate import read_comparison

    manifests = {name: read_manifest(folder) for name, folder in folders.items()}
    start = manifests["sft"].config.get("model")
    comparison = read_comparison(folders["evaluation"])
    decision = json.loads((folders["promotion"] / "decision.json").read_text())
    gain, execution = comparison["gain"], execution_name(run)
    steps = read_policy_steps(folders[POLICY])

    def passed(which: str) -> dict[str, object]:
        interval = comparison[which]["pass_at_1"]
        return {"value": interval["mean"], "interval": [interval["low"], interval["high"]]}

    before, after = passed("before"), passed("after")
    return {
        "run_id": run.run_id,
        # Folder or hub id; empty: from scratch; null where the warm start does not say.
        "start_model": start["path"] if isinstance(start, dict) else None,
        "warm_start": manifests["sft"].kind != START_MODEL,
        "trained_by": manifests[
            POLICY
        ].kind,  # "rl", "preference", or "model" for one from elsewhere
        "pass_at_1": {"warm_start": before["value"], "rl": after["value"]},
        "pass_at_1_interval": {"warm_start": before["interval"], "rl": after["interval"]},
        "policy_step": None if steps is None else str(steps),  # of its RL run
        "gain": gain["mean"],
        "gain_interval": [gain["low"], gain["high"]],
        "problems": comparison["problems"],
        "seconds": {
            # A model that was made elsewhere has no time of its own.
            **{name: manifest.metrics.get("seconds", 0.0) for name, manifest in manifests.items()},
            "total": time.time() - run.started_at,
        },
        "cached": [n for n, m in manifests.items() if m.flyte_execution != execution],
        "config_digest": config_digest,
        "digests": {name: manifest.digest for name, manifest in manifests.items()},
        "artifacts": {name: str(folder) for name, folder in folders.items()},
        "promotion": decision,
        "mlflow": {
            "tracking_uri": tracking_uri(),
            "experiment": run.experiment,
            "run_id": run.mlflow_run,
            "url": run.mlflow_url,  # its page on a server; empty for a store without one
        },
    }


def write_summary(run: RunContext, facts: dict[str, Any]) -> Path:
    """Write `runs/<run id>/summary.json` whole or not at all."""
    from engine.errors import StorageError

    path = run_folder(run) / "summary.json"
    draft = path.with_name(".summary.json")
    try:
        draft.write_text(json.dumps(facts, indent=2) + "\n")
        os.replace(draft, path)
    except OSError as error:
        raise StorageError(
            f"can't write {path}: {error}; free space or set HYBRIDFLYTE_HOME"
        ) from error
    return path


def finish_run(run: RunContext, facts: dict[str, Any], path: Path) -> None:
    """Record the outcome on the MLflow parent run and end it."""
    from engine.tracking import Tracker

    tracker = Tracker(experiment=run.experiment)
    metrics = {
        "pass_at_1_warm_start": facts["pass_at_1"]["warm_start"],
        "pass_at_1_rl": facts["pass_at_1"]["rl"],
        "gain": facts["gain"],
        "gain_low": facts["gain_interval"][0],
        "gain_high": facts["gain_interval"][1],
    }
    tracker.finish_pipeline(run.mlflow_run, "FINISHED", metrics)


def print_summary(facts: dict[str, Any], path: Path, folders: dict[str, Path]) -> None:
    """Print the summary table and where to look further."""
    from engine.console import human_time, points, table

    def rate(name: str) -> str:
        low, high = facts["pass_at_1_interval"][name]
        return f"{facts['pass_at_1'][name]:.1%}  [{low:.1%}, {high:.1%}]"

    low, high = facts["gain_interval"]
    cached = set(facts["cached"])
    times = ", ".join(
        f"{facts['trained_by'] if name == POLICY else name} "
        f"{'cached' if name in cached else human_time(seconds)}"
        for name, seconds in facts["seconds"].items()
        if name != "total"
    )
    decision = facts["promotion"]
    method = "preferences" if facts["trained_by"] == "preference" else "RL"
    first = "warm start" if facts["warm_start"] else "start model"
    rows = {
        f"pass@1 {first}": rate("warm_start"),
        f"pass@1 after {method}": rate("rl"),
        "gain": f"{points(facts['gain'], low, high)} on {facts['problems']} problems",
        "promotion": f"version {decision['model_version']} "
        f"{'promoted' if decision['promoted'] else 'not promoted'} (why: below)",
        "time": f"{human_time(facts['seconds']['total'])} ({times})",
        **({} if facts["warm_start"] else {"start model": facts["start_model"]}),
        "model": display_path(folders[POLICY]),
        "model's step": facts["policy_step"] or "not recorded",
        "report (Deck)": display_path(Path(facts["report"])),
        "summary": display_path(path),
        "MLflow run": f"{facts['mlflow']['run_id']} in {facts['mlflow']['experiment']!r}",
        "MLflow UI": facts["mlflow"]["url"]
        or f"mlflow ui --backend-store-uri {facts['mlflow']['tracking_uri']}",
        "lineage": f"python -m engine.lineage {display_path(folders[POLICY])}",
    }
    episodes = episode_lines(folders["evaluation"])
    what = "Preference run " if facts["trained_by"] == "preference" else "RLHF run "
    what = "Agents run " if episodes else what
    table(what + facts["run_id"], [{"": k, "result": v} for k, v in rows.items()])
    for line in (*episodes, *learned_lines(folders)):
        echo(line)
    echo(f"promotion: {decision['reason']}")  # too long for a table's column
    if max(facts["pass_at_1"].values()) < NEAR_ZERO:
        echo(near_zero_advice(facts["start_model"]))


def episode_lines(evaluation: Path) -> list[str]:
    """Turns, returns and calls of both models on the split `test`, where they played episodes."""
    from engine.evaluation.summary import read_sets

    return [f"episodes: {one.line()}" for one in read_sets(evaluation)[0].comparison.episodes]


def learned_lines(folders: dict[str, Path]) -> list[str]:
    """How well the reward model ranks, and what it did to the policy, where there is one."""
    from engine.evaluation.policy_steps import read_overoptimisation
    from engine.storage.artifacts import read_manifest
    from tasks.learned_reward import ranking

    lines = []
    if "reward_model" in folders:
        lines.append(f"reward model: {ranking(read_manifest(folders['reward_model']).metrics)}")
    if found := read_overoptimisation(folders[POLICY]):
        lines.append(f"over-optimisation: {found.sentence()}")
    return lines


def near_zero_advice(start_model: str | None) -> str:
    """What to do where neither model solves anything."""
    if start_model == "":
        return (
            "Both models are near 0: a model this small, from scratch, can't solve these problems. "
            "Start from a pretrained one with --model FOLDER."
        )
    name = f"the start model {start_model}" if start_model else "the model that RL started from"
    return (
        f"Both models are near 0: {name} solves almost none of these problems, so RL has next to "
        "nothing to learn from. Look at its answers in the report, and start from a stronger model "
        "with --model FOLDER."
    )


def tracking_uri() -> str:
    """Where MLflow keeps this run, without its password."""
    from engine.redaction import redact
    from engine.tracking.connection import default_uri

    return redact(default_uri())


# Tasks that open and end runs of the workflows that have only some stages of `rlhf`.

SKIPPED_TAG = "hybridflyte.skipped"


class PromotionPlan(NamedTuple):
    """What `promote` needs."""

    run: RunContext
    data: DataConfig
    evaluate: EvaluateConfig
    promote: PromoteConfig
    seed: int
    needs_approval: bool
    profile: Profile


@task(**SHORT)
def open_promotion(
    config: RLHFConfig,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    seed: int,
    profile: str,
) -> PromotionPlan:
    """Check that the evaluation is of this model on this data, as configured; open the run."""
    from engine.evaluation.comparability import require_same_settings
    from engine.promotion.champions import check_evidence
    from engine.storage.artifacts import read_manifest
    from engine.tracking import Tracker

    with user_facing_errors():
        set_current_run(None)
        machines = read_profile(profile)
        folders = [local_artifact(artifact) for artifact in (dataset, policy, evaluation)]
        digest = check_evidence(*folders)
        seed = seed if seed >= 0 else config.seed
        evaluate = pinned_evaluation(config)
        require_same_settings(read_manifest(folders[2]), config.data, evaluate, seed)
        Tracker(experiment=config.tracking.experiment).check()
        run = open_run(config, (digest, ""), "promote_only")
        set_current_run(run)
    approval = config.promote.approval == "required"
    return PromotionPlan(run, config.data, evaluate, config.promote, seed, approval, machines)


@task(**SHORT, **DECK)
def finalize(run: RunContext, artifact: FlyteDirectory) -> FlyteDirectory:
    """Write the artifact's metrics to the MLflow run, end the run, and return the artifact.

    Of a promotion it writes the run's pages as well, see `tasks.evaluate`.
    """
    from engine.storage.artifacts import read_manifest
    from engine.tracking import Tracker

    with user_facing_errors():
        folder = local_artifact(artifact)
        manifest = read_manifest(folder)
        if manifest.kind == "promotion":
            echo(f"run {run.run_id}: report in {display_path(write_pages(run, folder))}")
        metrics = {k: v for k, v in manifest.metrics.items() if k != "seconds"}
        Tracker(experiment=run.experiment).finish_pipeline(run.mlflow_run, "FINISHED", metrics)
        where = f"{manifest.kind} in {display_path(folder)}"
        echo(f"run {run.run_id}: MLflow run {run.mlflow_run}; {where}")
        return as_output(folder)


@task(**SHORT, **DECK)
def finalize_skipped(run: RunContext, reason: str) -> FlyteFile:
    """End a run that had nothing to do: the reason goes to MLflow and into `summary.json`."""
    from engine.redaction import redact
    from engine.tracking import Tracker

    with user_facing_errors():
        tracker = Tracker(experiment=run.experiment)
        with tracker.translated("record why a run was skipped"):
            tracker.client.set_tag(run.mlflow_run, SKIPPED_TAG, redact(reason))
        tracker.finish_pipeline(run.mlflow_run, "FINISHED")
        path = write_summary(run, {"run_id": run.run_id, "skipped": reason})
        echo(f"run {run.run_id}: skipped: {reason}")
        show_facts("Skipped", {"run": run.run_id, "reason": redact(reason)})
    return FlyteFile(str(path))


# Task `review`: the lineage of anything, as one page (also the task's Deck), checked on request.
#
# Like `python -m engine.lineage`, but where the artifacts are: on the cluster, with its
# credentials.
# Not cached: the content at an address may change.

PAGE = "lineage.html"
SHOWN_FAULTS = 5


@task(
    cache=False,
    requests=SMALL,
    container_image=IMAGE,
    **with_secrets(),
    retries=2,
    timeout=timedelta(hours=6),
    **DECK,
)
def review(artifact: str, against: str, store: str, verify_content: bool) -> FlyteFile:
    """Write the page of an artifact's lineage; fail, with the page in the Deck, on tampering.

    `against` (empty: nothing) is compared with it, and `store` (empty: the one it lies in) is
    searched. With `verify_content`, all that it was made from and that came of it is re-hashed.
    """
    from engine.lineage.audit import audit
    from engine.lineage.compare import compare
    from engine.lineage.lookup import review as review_lineage
    from engine.lineage.page import render_page, write_page
    from engine.storage.filesystem import home

    with user_facing_errors():
        names = [against, artifact] if against else [artifact]
        found = review_lineage(names, [store] if store else [])
        comparison = None
        if against:
            comparison = compare(found.graph, found.starts[0], found.starts[-1])
        checked = audit(found) if verify_content else None
        page = render_page(found, checked, comparison)
        Deck("Lineage", page)
        folder = home() / "reviews"
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="review-", dir=folder)) / PAGE
        write_page(path, page)
        for finding in checked.findings if checked else ():
            echo(f"review: {'FAULT' if finding.is_fault else 'note'}: {finding.text}")
        echo(f"review: {found.summary} → {path}")
    if checked is not None and checked.faults:
        Deck.publish()  # Flyte writes the Deck of a task that ends well
        texts = "; ".join(finding.text for finding in checked.faults[:SHOWN_FAULTS])
        more = len(checked.faults) - SHOWN_FAULTS
        raise StageError(texts + (f"; and {more} more" if more > 0 else ""))
    return FlyteFile(str(path))
