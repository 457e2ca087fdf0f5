"""The pages of a run that judged a model: its evaluation with the verdict, and its lineage.

The artifact `evaluation` has a page of its own, made before anything was decided. These are written
at the end of the run, into its folder; artifacts stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekit import Deck

from tasks.context import RunContext, echo
from tasks.start_model import first_model, trained_by

if TYPE_CHECKING:
    from engine.evaluation.lm_eval import HarnessScore
    from engine.evaluation.report import Link, Verdict

REPORT, LINEAGE = "report.html", "lineage.html"


def run_folder(run: RunContext) -> Path:
    """Where a run leaves what is no artifact: its summary and its pages."""
    from engine.errors import StorageError
    from engine.storage.locations import home

    folder = home() / "runs" / run.run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"can't make {folder}: {error.strerror or error}; free space or set HYBRIDFLYTE_HOME"
        ) from error
    return folder


def write_pages(run: RunContext, promotion: Path) -> Path:
    """Write `report.html` and `lineage.html` of the model that the artifact `promotion` is about.

    They are the task's Decks as well. Returns the path of the report.
    """
    import pandas as pd

    from engine.evaluation.overoptimisation import read_overoptimisation
    from engine.evaluation.report import render_report
    from engine.evaluation.sets import TEST, read_sets, rows_of_set
    from engine.evaluation.summary import EvaluationComparison
    from engine.lineage.page import write_page
    from engine.storage.artifacts import local_path
    from engine.storage.manifest import read_manifest
    from tasks.evaluate import read_comparison, training_curves

    parents = {parent.name: parent for parent in read_manifest(promotion).parents}
    evaluation, policy = (local_path(parents[name].uri) for name in ("evaluation", "policy"))
    comparison = EvaluationComparison.from_dict(read_comparison(evaluation))
    digest, folder, sets = parents["policy"].digest, run_folder(run), read_sets(evaluation)
    graph = lineage_page(parents["policy"].uri, [parents["evaluation"].uri, str(promotion)])
    if graph:
        write_page(folder / LINEAGE, graph)
    page = render_report(
        comparison,
        rows_of_set(pd.read_parquet(evaluation / "rows_warm_start.parquet"), TEST),
        rows_of_set(pd.read_parquet(evaluation / "rows_rl.parquet"), TEST),
        facts={
            "run": run.run_id,
            "data": f"{comparison.problems} held-out problems of {parents['dataset'].digest[:12]}",
            "known from training": "; ".join(f"{one.name}: {one.contamination}" for one in sets),
            **model_facts(digest, policy, page=bool(graph)),
        },
        curves=training_curves(policy),
        verdict=read_verdict(promotion),
        before=first_model(read_manifest(evaluation).parents),
        after=trained_by(read_manifest(evaluation).parents),
        overoptimisation=read_overoptimisation(policy),
        harness=read_harness(evaluation),
        sets=sets,
    )
    write_page(folder / REPORT, page)
    Deck("Evaluation", page)
    if graph:
        Deck("Lineage", graph)
    return folder / REPORT


def read_harness(evaluation: Path) -> list[tuple[HarnessScore, HarnessScore]]:
    """Both models' scores in the lm-evaluation-harness; none where it was not run."""
    from engine.evaluation.lm_eval import FILE, from_json, pairs

    file = evaluation / FILE
    if not file.is_file():
        return []
    return pairs(from_json(file.read_bytes(), str(file)), "warm_start", "rl")


def model_facts(digest: str, policy: Path, page: bool = False) -> dict[str, str | Link]:
    """The evaluated model's digest, its step of the RL run that made it, and its lineage: a page
    beside the report, or the command."""
    from engine.evaluation.policy_steps import read_policy_steps
    from engine.evaluation.report import Link

    command = f"python -m engine.lineage {digest[:12]} --html {LINEAGE}"
    link = Link(f"{LINEAGE} (in a Deck: the tab Lineage)", LINEAGE)
    steps = read_policy_steps(policy)
    of = {} if steps is None else {"step of training": str(steps)}
    return {"model": digest, **of, "lineage": link if page else command}


def lineage_page(policy: str, stores: Sequence[str]) -> str:
    """The page of a model's lineage; empty, and it is said why, where it can't be read.

    stores: where its descendants are looked for. All that the shared store holds would be more than
    the end of a run should read.
    """
    from engine.errors import EngineError
    from engine.lineage.page import render_page
    from engine.lineage.review import review

    try:
        return render_page(review([policy], stores))
    except EngineError as error:
        echo(f"report: there is no page of the lineage: {error}")
        return ""


def read_verdict(promotion: Path) -> Verdict:
    """What `decision.json` says, for a person."""
    from engine.evaluation.report import Verdict

    decision: dict[str, Any] = json.loads((promotion / "decision.json").read_text())
    version = f"{decision['model_name']} version {decision['model_version']}"
    holds = decision["promoted"] or decision["previous_champion"] == decision["model_version"]
    if holds:
        title = f"{version} {'is now' if decision['promoted'] else 'stays'} {decision['alias']}"
    elif decision["waits_for_approval"]:
        title = f"{version} waits for approval"
    else:
        title = f"{version} was not promoted"
    return Verdict(holds, title, decision["reason"])
