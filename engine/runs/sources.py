"""A run's settings, metrics and answers, from where the run left them.

That is the folder of a command line (`engine.main_ppo` and others), a workflow's `runs/<id>`, an
artifact, or a run in MLflow. Answers are those of an evaluation, or of the last validation.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from engine.errors import DataError, TrackingError
from engine.evaluation.policy_steps import SCORE, read_policy_steps
from engine.evaluation.results import read_rows
from engine.lineage.lookup import ORIGIN, open_registry, review
from engine.samples.sample_files import FOLDER, VALIDATION, SampleFolder
from engine.storage.artifacts import Manifest, local_path
from engine.storage.digests import MANIFEST
from engine.storage.filesystem import home, read_file
from engine.tracking.connection import flatten, parameters
from engine.tracking.metric_logs import FILE
from engine.tracking.model_versions import all_pages
from engine.tracking.runs import NAME_TAG, PARENT_TAG, RUN_TAG, STAGE_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run

    from engine.tracking import Tracker

SUMMARY = "summary.json"
LISTED = {"reward": "reward/mean", "validation": SCORE, "gain": "gain"}
TRAINING = ("rl", "preference", "sft")  # stages whose metrics are a pipeline's: the first there is
PROBLEM = ["dataset", "prompt", "ground_truth", "number"]
Curve = dict[int, float]  # finite values of a metric by step


@dataclass(frozen=True)
class RecordedRun:
    """One run as it was recorded; what it did not record is empty."""

    name: str
    place: str  # folder, address, or id in MLflow
    settings: Mapping[str, str]  # by dotted name, as texts without credentials
    metrics: Mapping[str, Curve]
    answers: pd.DataFrame = field(default_factory=pd.DataFrame)  # [N] correct, completion
    test: str = ""  # that was answered: "evaluation 3f9a0c12", "validation at step 40"
    evaluation: Manifest | None = None


def read_run(reference: str, uri: str = "") -> RecordedRun:
    """Read a run by its folder or address, its name in `list_runs`, an artifact, or its MLflow id.

    uri: of MLflow's store; empty: this machine's. Raises DataError for what is no run, and the
    EngineError of a store, of MLflow or of an artifact that can't be read.
    """
    if re.fullmatch("[0-9a-f]{32}", reference):
        return _of_mlflow(reference, open_registry(uri))
    place = reference.rstrip("/")
    named = (Path(place), home() / "runs" / place, home() / "checkpoints" / place)
    place = str(next((folder for folder in named if folder.exists()), place))
    for summary in _read_json(f"{place}/{SUMMARY}"):
        if "skipped" in summary:
            raise DataError(f"{place} was skipped ({summary['skipped']}); give another run")
        run = _of_artifact(str(local_path(summary["artifacts"]["evaluation"])))
        return replace(run, name=summary["run_id"], place=place)
    with suppress(FileNotFoundError):
        return _of_artifact(place)
    if re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", reference):  # a workflow that has no summary here
        tracker = open_registry(uri)
        for tracked, _ in _mlflow_runs(tracker):
            if tracked.data.tags.get(RUN_TAG) == reference:
                return _of_mlflow(tracked.info.run_id, tracker)
    return _of_folder(place)


def _of_artifact(place: str) -> RecordedRun:
    """Read an evaluation and its policy, or a model and its newest evaluation, if there is one."""
    read_file(f"{place}/{MANIFEST}", DataError)
    reviewed = review([place], registry=False)
    graph, start = reviewed.graph, reviewed.starts[0]
    children = (graph.nodes[e.child] for e in graph.children(start.key) if e.name == "policy")
    evaluations = [node for node in (start, *children) if node.kind == "evaluation"]
    evaluations = sorted(evaluations, key=lambda node: str(node.created_at))[-1:]
    above = [edge for node in evaluations for edge in graph.parents(node.key)]
    policy = next((graph.nodes[edge.parent] for edge in above if edge.name == "policy"), start)
    code = policy.manifest.code_version if policy.manifest else ""
    settings: dict[str, Any] = {"code": code, "trained_by": policy.kind}
    for node in (*evaluations, policy, *graph.ancestors(policy.key)):
        settings = {**flatten(node.draft.config), **settings}
        settings |= {node.kind: node.digest} if node.kind in ("source", "dataset") else {}
    settings.setdefault("model.path", settings.pop("model_path", ""))
    for audit in settings.pop("reward_audit", []):
        verdict = "passed" if audit["passed"] else f"holes: {', '.join(audit['holes'])}"
        settings[f"reward_audit.{audit['scorer']}"] = verdict
    steps = read_policy_steps(local_path(policy.uri))
    metrics = _curves([] if steps is None else steps.rows.to_dict("records"))
    run = RecordedRun(policy.name, place, parameters(settings), metrics)
    for node in evaluations:
        rows = read_rows(local_path(node.uri), "rl")
        rows = rows.rename(columns={"greedy_correct": "correct", "greedy_completion": "completion"})
        test = f"evaluation {node.digest[:12]}"
        run = replace(run, answers=_by_problem(rows), test=test, evaluation=node.manifest)
    return run


def _of_folder(place: str) -> RecordedRun:
    """Read what a command line leaves: a checkpoint, metrics.jsonl, and samples of rollouts."""
    state = _newest_state(Path(place))
    metrics = _read_json(f"{place}/{FILE}") or state.get("history", [])
    answers, test = _last_validation(SampleFolder(f"{place}/{FOLDER}"))
    if not (state or metrics or test):
        raise DataError(
            f"{place} is no run: it has no {SUMMARY}, {MANIFEST}, checkpoints, {FILE} or {FOLDER}; "
            "give what `python -m engine.runs` shows, an artifact, or an MLflow id"
        )
    loader = state.get("prompts", {}).get("loader", {})
    settings = {f"data.{k}": v for k, v in loader.items() if k in ("train_files", "rows", "digest")}
    if state:  # none before the first checkpoint
        settings |= {"steps": state["step"], **state.get("settings", {})}
        settings["model.path"] = state.get("policy", {}).get("model", "")
    name, texts = "/".join(place.split("/")[-2:]), parameters(settings)
    return RecordedRun(name, place, texts, _curves(metrics), answers, test)


def _of_mlflow(run_id: str, tracker: Tracker) -> RecordedRun:
    """Read a run of MLflow; a pipeline's from its folder, where that is on this machine."""
    client = tracker.client
    with tracker.translated("read a run"), tempfile.TemporaryDirectory() as scratch:
        run = client.get_run(run_id)
        folder = home() / "runs" / run.data.tags.get(RUN_TAG, "none")
        if (folder / SUMMARY).is_file():
            return read_run(str(folder))
        clause = f"tags.`{PARENT_TAG}` = '{run_id}'"
        children = client.search_runs([run.info.experiment_id], clause)
        stages = {child.data.tags.get(STAGE_TAG, ""): child for child in reversed(children)}
        trained = next((stages[kind] for kind in TRAINING if kind in stages), run)
        trained_id, answers, test = trained.info.run_id, pd.DataFrame(), ""
        points = [p for k in trained.data.metrics for p in client.get_metric_history(trained_id, k)]
        files = [file.path for file in client.list_artifacts(trained_id, FOLDER)]
        for file in [file for file in files if f"/{VALIDATION}_" in file][-1:]:
            path = client.download_artifacts(trained_id, file, scratch)
            answers, test = _last_validation(SampleFolder(Path(path).parent))
    curves = _curves({"step": point.step, point.key: point.value} for point in points)
    texts = run.data.params.items()  # a pipeline's are JSON of a section
    settings = {key: json.loads(text) if text.startswith("{") else text for key, text in texts}
    name = run.data.tags.get(NAME_TAG, run_id)
    return RecordedRun(name, run_id, parameters(settings), curves, answers, test)


def _last_validation(samples: SampleFolder) -> tuple[pd.DataFrame, str]:
    """Return the answers of the last validation, the mean and the first of each group; or none."""
    names = [name for name in samples.names() if name.split == VALIDATION]
    table = samples.read(names[-1])[0].to_pandas() if names else pd.DataFrame({"correct": []})
    if table["correct"].isna().all():
        return pd.DataFrame(), ""
    groups = table.astype({"correct": float}).groupby("group", sort=False)
    rows = groups.first().assign(correct=groups["correct"].mean(), dataset=VALIDATION)
    return _by_problem(rows), f"{VALIDATION} at step {names[-1].step}"


def _by_problem(rows: pd.DataFrame) -> pd.DataFrame:
    """Index answers by problem; equal problems of a table are numbered."""
    number = rows.groupby(PROBLEM[:3], sort=False).cumcount()
    rows = rows.astype({"correct": float}).assign(number=number)
    return rows.set_index(PROBLEM)[["correct", "completion"]]


def _curves(rows: Iterable[Mapping[Any, Any]]) -> dict[str, Curve]:
    """Return metrics by name from rows of a step; of a step that was logged twice, the last."""
    curves: dict[str, Curve] = {}
    for row in rows:
        for name in row.keys() - {"step"}:
            if isinstance(row[name], float | int) and math.isfinite(row[name]):
                curves.setdefault(name, {})[int(row["step"])] = row[name]
    return curves


def _read_json(address: str) -> list[dict[str, Any]]:
    """Read JSON objects, one or one a line, to the first that is not whole; none without a file."""
    values: list[dict[str, Any]] = []
    end, decoder = 0, json.JSONDecoder()
    with suppress(FileNotFoundError, ValueError):
        text = read_file(address, DataError).decode()
        while end < len(text):
            value, end = decoder.raw_decode(text, end + bool(values))  # behind the end of a line
            values.append(value)
    return values


def list_runs(uri: str = "", last: int = 20) -> list[dict[str, Any]]:
    """Return the newest runs of this machine's folders and of MLflow, each once.

    Each has `run` (as `read_run` takes it), `updated` (UTC), `state`, `steps`, the last mean
    rewards of training (`reward`) and `validation`, of a workflow the `gain` (of pass@1, a
    fraction), and `mlflow_run`; None for what is not known.
    uri: of MLflow's store; empty: this machine's, if it has one.
    """
    rows = {row["mlflow_run"] or row["run"]: row for row in _folders()}
    tracker: Tracker | None = None
    with suppress(*[] if uri else [TrackingError]):  # nothing was tracked on this machine
        tracker = open_registry(uri)
    for run, trained in islice(_mlflow_runs(tracker), last) if tracker is not None else ():
        run_id, updated = run.info.run_id, (run.info.end_time or run.info.start_time) / 1000
        row = _row(run.data.tags.get(RUN_TAG, run_id), updated, {}, run_id)
        row = rows.setdefault(run_id, row)
        metrics = (trained.data.metrics if trained else {}) | run.data.metrics
        row |= {k: metrics.get(name, row[k]) for k, name in LISTED.items()}
        row["state"] = run.info.status.lower()
        if tracker is not None and trained is not None and row["steps"] is None:
            with tracker.translated("read a run"):
                points = tracker.client.get_metric_history(trained.info.run_id, LISTED["reward"])
            row["steps"] = max((point.step for point in points), default=None)
    newest = sorted(rows.values(), key=lambda row: row["updated"], reverse=True)[:last]
    return [_with_last_step(row) for row in newest]


def _mlflow_runs(tracker: Tracker) -> Iterator[tuple[Run, Run | None]]:
    """Yield the runs of pipelines, with their RL, and of command lines; newest first."""
    trained: dict[str, Run] = {}
    client, newest = tracker.client, ["attributes.start_time DESC"]
    with tracker.translated("list the runs"):
        where = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = all_pages(lambda t: client.search_runs(where, order_by=newest, page_token=t))
        for run in runs:
            tags = run.data.tags
            if PARENT_TAG not in tags:
                yield run, trained.get(run.info.run_id)
            elif tags.get(STAGE_TAG) == "rl":  # started after its pipeline
                trained.setdefault(tags[PARENT_TAG], run)


def _folders() -> Iterator[dict[str, Any]]:
    for folder in home().glob("runs/*/"):
        for summary in _read_json(f"{folder}/{SUMMARY}"):
            run_id = summary.get("mlflow", {}).get("run_id", "")
            policy = summary.get("artifacts", {}).get("rl", "")
            made = dict(*(manifest["metrics"] for manifest in _read_json(f"{policy}/{MANIFEST}")))
            row = _row(folder.name, folder.stat().st_mtime, made | summary, run_id)
            row["steps"] = int(made.get("final/last_step", 0)) or None
            yield row | {"state": "skipped" if "skipped" in summary else "finished"}
    for folder in home().glob("checkpoints/*/*/"):
        if (folder / ORIGIN).exists():  # of a workflow's stage
            continue
        if _markers(folder) or (folder / FOLDER).is_dir():
            run_id = "".join(path.read_text() for path in folder.glob("checkpoints/mlflow_run"))
            yield _row("/".join(folder.parts[-2:]), folder.stat().st_mtime, {}, run_id)


def _with_last_step(row: dict[str, Any]) -> dict[str, Any]:
    """Fill in what a command line's newest checkpoint knows; its history may be megabytes."""
    state = _newest_state(home() / "checkpoints" / row["run"])
    last = {name: value for step in state.get("history", []) for name, value in step.items()}
    known = {key: last.get(name) for key, name in LISTED.items()} | {"steps": state.get("step")}
    return {key: known.get(key) if value is None else value for key, value in row.items()}


def _row(run: str, updated: float, metrics: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    when = f"{datetime.fromtimestamp(updated, UTC):%Y-%m-%d %H:%M:%S.%f}"
    row = {"run": run, "updated": when, "state": "", "steps": None, "mlflow_run": run_id}
    return row | {key: metrics.get(name) for key, name in LISTED.items()}


def _newest_state(folder: Path) -> dict[str, Any]:
    """Return what the newest checkpoint of a command line's folder has recorded; {} without one."""
    states = (_read_json(f"{path.parent}/state.json") for path in _markers(folder)[-1:])
    return next((values[0]["values"] for values in states if values), {})


def _markers(folder: Path) -> list[Path]:
    """Return the markers of a command line's complete checkpoints, oldest first."""
    return sorted(folder.glob("checkpoints*/step_*/COMPLETE"), key=os.path.getmtime)
