"""End a run with its summary, pages and MLflow record; and `review` the lineage of anything.

`report` reads manifests, so a cached run reports the same facts.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.console import display_path, human_time, points, say, table
from engine.errors import LineageError, StorageError
from engine.evaluation.policy_steps import read_overoptimisation, read_policy_steps
from engine.evaluation.summary import read_sets
from engine.lineage.audit import audit
from engine.lineage.compare import compare
from engine.lineage.lookup import review as review_lineage
from engine.lineage.page import render_page, write_page
from engine.redaction import redact
from engine.stages.evaluation import LINEAGE, write_pages
from engine.stages.fetch import START_MODEL
from engine.stages.settings import RunContext
from engine.stages.stage import Artifact, host, run_folder, shared, show_facts
from engine.storage.artifacts import local_path, read_manifest
from engine.storage.filesystem import home, write_atomically
from engine.tracking import Tracker
from engine.tracking.connection import default_uri

NEAR_ZERO = 0.02  # pass@1, a fraction
POLICY = "rl"  # the trained policy's key in the summary, whatever trained it
LEARNED_FROM = ("pairs", "reference", "reward_model")  # kinds of a policy's parents
SHOWN_FAULTS = 5


def report(
    run: RunContext,
    config_digest: str,
    dataset: Artifact,
    warm_start: Artifact,
    policy: Artifact,
    evaluation: Artifact,
    promotion: Artifact,
) -> Path:
    """Write the run's pages and `summary.json`, end the MLflow parent run, print the summary."""
    trained = policy.local()
    folders = {
        "dataset": dataset.local(),
        "sft": warm_start.local(),
        **made_before(trained),
        POLICY: trained,
        "evaluation": evaluation.local(),
        "promotion": promotion.local(),
    }
    facts = summarise(run, config_digest, folders)
    facts["report"] = str(write_pages(run, folders["promotion"]))
    path = write_summary(run, facts)
    low, high = facts["gain_interval"]
    metrics = {f"pass_at_1_{name}": value for name, value in facts["pass_at_1"].items()}
    metrics |= {"gain": facts["gain"], "gain_low": low, "gain_high": high}
    Tracker(experiment=run.experiment).finish_pipeline(run.mlflow_run, "FINISHED", metrics)
    print_summary(facts, path, folders)
    return path


def made_before(policy: Path) -> dict[str, Path]:
    """Return what the policy learned from beside dataset and warm start: pairs, reward model."""
    folders: dict[str, Path] = {}
    for parent in read_manifest(policy).parents:
        if parent.kind in LEARNED_FROM:
            folder = local_path(parent.uri)
            folders |= made_before(folder) | {parent.kind: folder}
    return folders


def summarise(run: RunContext, config_digest: str, folders: dict[str, Path]) -> dict[str, Any]:
    """Collect the run's facts from its artifacts."""
    manifests = {name: read_manifest(folder) for name, folder in folders.items()}
    start = manifests["sft"].config.get("model")
    comparison = read_sets(folders["evaluation"])[0].comparison
    decision = json.loads((folders["promotion"] / "decision.json").read_text())
    gain, execution = comparison.gain, host().execution or run.run_id
    passed = {"warm_start": comparison.before.pass_at_1, "rl": comparison.after.pass_at_1}
    steps = read_policy_steps(folders[POLICY])
    return {
        "run_id": run.run_id,
        # Folder or hub id; empty: from scratch; null where the warm start does not say.
        "start_model": start["path"] if isinstance(start, dict) else None,
        "warm_start": manifests["sft"].kind != START_MODEL,
        # "rl", "preference", or "model" for one from elsewhere
        "trained_by": manifests[POLICY].kind,
        "pass_at_1": {name: rate.mean for name, rate in passed.items()},
        "pass_at_1_interval": {name: [rate.low, rate.high] for name, rate in passed.items()},
        "policy_step": None if steps is None else str(steps),  # of its RL run
        "gain": gain.mean,
        "gain_interval": [gain.low, gain.high],
        "problems": comparison.problems,
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
            "tracking_uri": redact(default_uri()),
            "experiment": run.experiment,
            "run_id": run.mlflow_run,
            "url": run.mlflow_url,  # its page on a server; empty for a store without one
        },
    }


def write_summary(run: RunContext, facts: dict[str, Any]) -> Path:
    """Write `runs/<run id>/summary.json` whole or not at all."""
    path = run_folder(run) / "summary.json"
    try:
        write_atomically(path, [f"{json.dumps(facts, indent=2)}\n".encode()])
    except OSError as error:
        raise StorageError(
            f"can't write {path}: {error}; free space or set HYBRIDFLYTE_HOME"
        ) from error
    return path


def print_summary(facts: dict[str, Any], path: Path, folders: dict[str, Path]) -> None:
    """Print the summary table and where to look further."""

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
    episodes = read_sets(folders["evaluation"])[0].comparison.episodes
    kind = "Preference" if facts["trained_by"] == "preference" else "RLHF"
    title = f"{'Agents' if episodes else kind} run {facts['run_id']}"
    table(title, [{"": k, "result": v} for k, v in rows.items()])
    for episode in episodes:
        say(f"episodes: {episode.line()}")
    if "reward_model" in folders:
        say(f"reward model: {ranking(read_manifest(folders['reward_model']).metrics)}")
    if learned := read_overoptimisation(folders[POLICY]):
        say(f"over-optimisation: {learned.sentence()}")
    say(f"promotion: {decision['reason']}")  # too long for a table's column
    if max(facts["pass_at_1"].values()) < NEAR_ZERO:
        say(near_zero_advice(facts["start_model"]))


def near_zero_advice(start_model: str | None) -> str:
    """Say what to do where neither model solves anything."""
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


def ranking(metrics: dict[str, float]) -> str:
    """Say how well a reward model ranks held-out pairs."""
    values = {key.removeprefix("reward_model/validation_"): value for key, value in metrics.items()}
    if "accuracy" not in values:
        return "no pairs are held out, so how well it ranks is not known"
    return (
        f"ranks {values['accuracy']:.1%} of held-out pairs right "
        f"[{values['accuracy_low']:.1%}, {values['accuracy_high']:.1%}], calibration error "
        f"{values['calibration_error']:.3f}"
    )


def finalize(run: RunContext, artifact: Artifact) -> Artifact:
    """Write the artifact's metrics to the MLflow run, end the run, and return the artifact.

    For a promotion it writes the run's pages as well.
    """
    folder = artifact.local()
    manifest = read_manifest(folder)
    if manifest.kind == "promotion":
        say(f"run {run.run_id}: report in {display_path(write_pages(run, folder))}")
    metrics = {k: v for k, v in manifest.metrics.items() if k != "seconds"}
    Tracker(experiment=run.experiment).finish_pipeline(run.mlflow_run, "FINISHED", metrics)
    where = f"{manifest.kind} in {display_path(folder)}"
    say(f"run {run.run_id}: MLflow run {run.mlflow_run}; {where}")
    return shared(folder)


def finalize_skipped(run: RunContext, reason: str) -> Path:
    """End a run that had nothing to do: the reason goes to MLflow and into `summary.json`."""
    tracker = Tracker(experiment=run.experiment)
    with tracker.translated("record why a run was skipped"):
        tracker.client.set_tag(run.mlflow_run, "hybridflyte.skipped", redact(reason))
    tracker.finish_pipeline(run.mlflow_run, "FINISHED")
    path = write_summary(run, {"run_id": run.run_id, "skipped": reason})
    say(f"run {run.run_id}: skipped: {reason}")
    show_facts("Skipped", {"run": run.run_id, "reason": redact(reason)})
    return path


def review(artifact: str, against: str, store: str, verify_content: bool) -> Path:
    """Write the page of an artifact's lineage; LineageError, with the page shown, on tampering.

    Like `python -m engine.lineage`, but where the artifacts are: on the cluster, with its
    credentials. `against` (empty: nothing) is compared with it, and `store` (empty: the one it lies
    in) is searched. With `verify_content`, all that it was made from and that came of it is
    re-hashed.
    """
    lineage = review_lineage([*filter(None, [against]), artifact], [store] if store else [])
    starts = lineage.starts
    comparison = compare(lineage.graph, starts[0], starts[-1]) if against else None
    checked = audit(lineage) if verify_content else None
    page = render_page(lineage, checked, comparison)
    host().show("Lineage", page)
    folder = home() / "reviews"
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="review-", dir=folder)) / LINEAGE
    write_page(path, page)
    for finding in checked.findings if checked else ():
        say(f"review: {'FAULT' if finding.is_fault else 'note'}: {finding.text}")
    say(f"review: {lineage.summary} → {path}")
    if checked is not None and checked.faults:
        host().publish_pages()
        texts = "; ".join(finding.text for finding in checked.faults[:SHOWN_FAULTS])
        more = len(checked.faults) - SHOWN_FAULTS
        raise LineageError(texts + (f"; and {more} more" if more > 0 else ""))
    return path
