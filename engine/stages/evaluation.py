"""Stage `evaluate`: two models on the same held-out problems, and the pages of such a run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from engine.config import ContaminationConfig, DataConfig, EvaluateConfig
from engine.console import progress, say
from engine.controller.launch import ray_session
from engine.data.contract import EVALUATION_ROWS, check, check_disjoint
from engine.data.rows import prompt_text
from engine.data.sources import evaluation_files
from engine.data.templates import rows_spelling_control_tokens
from engine.data.tokenizer import load_tokenizer
from engine.errors import EngineError, LineageError
from engine.evaluation.comparability import comparable_settings
from engine.evaluation.decode import uses_ranks
from engine.evaluation.lm_eval import (
    FILE,
    HarnessScore,
    from_json,
    pairs,
    require_lm_eval,
    run_lm_eval,
    to_json,
)
from engine.evaluation.policy_steps import read_overoptimisation, read_policy_steps
from engine.evaluation.report_page import Link, Verdict, render_report
from engine.evaluation.scoring import evaluate_model, share_of
from engine.evaluation.summary import (
    TEST,
    EvaluatedSet,
    EvaluationComparison,
    Statistics,
    compare_sets,
    read_problems,
    read_sets,
    rows_of_set,
    write_sets,
)
from engine.lineage.lookup import review
from engine.lineage.page import render_page, write_page
from engine.promotion.gate import trained_on
from engine.rewards import scorer_identity
from engine.stages.dataset import SPLITS
from engine.stages.fetch import first_model, trained_by
from engine.stages.settings import EvaluationSettings, RunContext
from engine.stages.stage import LOCAL_OBJECT_STORE_BYTES, Artifact, host, run_folder, stage
from engine.storage.artifacts import Parent, local_path, read_manifest

if TYPE_CHECKING:
    from engine.console import Progress

REPORT, LINEAGE = "report.html", "lineage.html"
MODELS = ("warm_start", "rl")


def evaluate(
    run: RunContext,
    settings: EvaluationSettings,
    dataset: Artifact,
    warm_start: Artifact,
    policy: Artifact,
    parts: Iterable[pd.DataFrame] | None = None,
) -> Artifact:
    """Compare the two models by greedy pass@1, pass@k, majority vote, format and length.

    Artifact `evaluation`: `rows_warm_start.parquet`, `rows_rl.parquet` (schema `EVALUATION_ROWS`),
    `comparison.json` (rates with intervals, the paired gain, on the split `test`), `sets.json` (the
    same of every evaluation set, by source and level, and what is known from training),
    `report.html`, and with `evaluate.lm_eval.tasks` `lm_eval.json`.

    parts: the tables of `evaluate_part` in order; None: both models are decoded here.
    """
    data, config, seed = settings.data, settings.config, settings.seed
    ray = ray_session("ray" if uses_ranks(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("evaluation", run, comparable_settings(data, config, seed)) as this, ray:
        folder = this.load_parent("dataset", dataset)
        problems = read_problems(folder)
        check_held_out(folder)
        require_lm_eval(config.lm_eval)  # of this machine, which may be another than the plan's
        this.log_splits(folder, [path.stem for path in evaluation_files(folder).values()])
        models = {
            "warm_start": this.load_parent("warm_start", warm_start),
            "rl": this.load_parent("policy", policy),
        }
        if parts is None:
            rows = answer_problems(models, problems, data, config, seed)
        else:
            table = pd.concat(parts, ignore_index=True)
            rows = {n: table[table["model"] == n].reset_index(drop=True) for n in models}
        for name, frame in rows.items():
            check(frame, EVALUATION_ROWS, f"evaluation of {name}")
            frame.to_parquet(this.folder / f"rows_{name}.parquet", index=False)
        harness = harness_scores(this.folder, models, config, seed)
        sets = compare_sets(
            rows["warm_start"],
            rows["rl"],
            {name: known_from_training(folder, frame) for name, frame in problems.items()},
            Statistics(config.k, config.confidence, config.bootstrap_samples, seed),
        )
        write_sets(this.folder, sets)
        comparison = sets[0].comparison
        (this.folder / "comparison.json").write_text(comparison.to_json())
        facts = {
            "run": run.run_id,
            "data": describe_problems(data.source, problems[TEST], models["rl"]),
            "scorer": scorer_identity(config.scorer),
            "known from training": "; ".join(f"{s.name}: {s.contamination}" for s in sets),
            **model_facts(this.parent("policy").digest, models["rl"]),
            "promotion": "decided after this page; then the run's report.html has the verdict",
        }
        scores = pairs(harness, *MODELS)
        page = comparison_page(
            comparison, rows, facts, models["rl"], this.parents, scores, sets, None
        )
        (this.folder / "report.html").write_text(page)
        host().show("Evaluation", page)
        for line in (line for compared in sets for line in compared.lines()):
            say(f"evaluation: {line}")
        return this.publish(evaluation_metrics(sets) | harness_metrics(harness))


def evaluation_metrics(sets: Sequence[EvaluatedSet]) -> dict[str, float]:
    """Return rates and gains of the split `test`, of episodes, and of further evaluation sets."""
    comparison = sets[0].comparison
    return (
        {
            "pass_at_1_warm_start": comparison.before.pass_at_1.mean,
            "pass_at_1_rl": comparison.after.pass_at_1.mean,
            "gain": comparison.gain.mean,
            "gain_low": comparison.gain.low,
            "gain_high": comparison.gain.high,
        }
        | {
            f"episodes/{episode.name.replace(', ', '/').replace(' ', '_')}_rl": episode.after.mean
            for episode in comparison.episodes
        }
        | {f"{s.name}/pass_at_1_rl": s.comparison.after.pass_at_1.mean for s in sets[1:]}
        | {f"{s.name}/gain": s.comparison.gain.mean for s in sets[1:]}
    )


def evaluate_part(
    run: RunContext,
    settings: EvaluationSettings,
    dataset: Artifact,
    warm_start: Artifact,
    policy: Artifact,
    part: int,
) -> pd.DataFrame:
    """Return both models' rows of one share of the problems, `part` of `config.map_parts`.

    Parts are for several machines that need not start together. Both models answer the same share,
    so joined tables are those of one machine, to the bit where its arithmetic is.
    """
    config = settings.config
    ray = ray_session("ray" if uses_ranks(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with ray:
        say(f"evaluation: part {part + 1} of {config.map_parts} starts")
        models = {"warm_start": warm_start.local(), "rl": policy.local()}
        problems, share = read_problems(dataset.local()), (part, config.map_parts)
        rows = answer_problems(models, problems, settings.data, config, settings.seed, share)
        return pd.concat(list(rows.values()), ignore_index=True)


def answer_problems(
    models: Mapping[str, Path],
    problems: Mapping[str, pd.DataFrame],
    data: DataConfig,
    config: EvaluateConfig,
    seed: int,
    part: tuple[int, int] = (0, 1),
) -> dict[str, pd.DataFrame]:
    """Return each model's rows, with a progress bar."""
    share = share_of(sum(map(len, problems.values())), part)
    each = (share.stop - share.start) * (1 + config.samples)
    rows: dict[str, pd.DataFrame] = {}
    bar: Progress[None] = progress(len(models) * each, "evaluate", "answer")
    with bar:
        for name, folder in models.items():
            rows[name] = evaluate_model(
                folder,
                problems,
                name,  # type: ignore[arg-type]
                config,
                max_response_length=data.max_response_length,
                max_prompt_length=data.max_prompt_length,
                seed=seed,
                part=part,
                on_progress=update_progress(bar, len(rows) * each),
            )
    return rows


def update_progress(bar: Progress[None], offset: int) -> Callable[[int], None]:
    """Return a callback that sets the bar to `offset` plus one model's finished completions."""
    return lambda done: bar.update(offset + done - bar.count)


def harness_scores(
    folder: Path, models: Mapping[str, Path], config: EvaluateConfig, seed: int
) -> dict[str, list[HarnessScore]]:
    """Run the lm-evaluation-harness on each model, as configured, and write `lm_eval.json`."""
    scores: dict[str, list[HarnessScore]] = {}
    if not config.lm_eval.tasks:
        return scores
    for name, model in models.items():
        with tempfile.TemporaryDirectory(prefix="hybridflyte-lm-eval-") as scratch:
            scores[name] = run_lm_eval(model, config.lm_eval, seed, Path(scratch))
        summary = ", ".join(f"{s.task} {s.metric} {s.value:.4g}" for s in scores[name])
        say(f"evaluation: lm-evaluation-harness on {name}: {summary}")
    (folder / FILE).write_text(to_json(scores, config.confidence))
    return scores


def harness_metrics(scores: Mapping[str, Sequence[HarnessScore]]) -> dict[str, float]:
    """Return the harness's scores as metrics of the stage: the RL model's by their names."""
    return {
        score.key if name == "rl" else f"{score.key}_{name}": score.value
        for name, model_scores in scores.items()
        for score in model_scores
    }


def describe_problems(source: str, test: pd.DataFrame, model: Path) -> str:
    """Say where the problems are from, how many, and how many spell control tokens."""
    rows = [{"prompt": prompt} for prompt in test["prompt"]]
    spelled = rows_spelling_control_tokens(rows, load_tokenizer(model), "escape", "test")
    escaped = f", {len(spelled)} of them with control tokens kept as plain text" * bool(spelled)
    return f"{source}, {len(test)} held-out problems{escaped}"


def known_from_training(dataset: Path, test: pd.DataFrame) -> int:
    """Count the prompts that were trained on, by the words of the promotion rule's defaults."""
    rule = ContaminationConfig()
    frames = (pd.read_parquet(dataset / f"{name}.parquet") for name in ("sft_train", "train"))
    training = (prompt_text(prompt) for frame in frames for prompt in frame["prompt"])
    texts = [prompt_text(prompt) for prompt in test["prompt"]]
    return sum(trained_on(texts, training, rule.ngram, rule.overlap))


def check_held_out(dataset: Path) -> None:
    """Raise DataError when a test prompt is in any split that a stage trained or chose on."""
    check_disjoint({name: pd.read_parquet(dataset / f"{name}.parquet") for name in SPLITS})


def training_curves(policy: Path) -> dict[str, list[float]]:
    """Return the per-step metrics of training that made the model; empty where it is not known."""
    run = read_policy_steps(policy)
    if run is None:
        return {}
    steps = run.rows
    columns = {
        "reward": "reward/mean",
        "KL": "actor/kl",
        "entropy": "actor/entropy",
        "response length": "response/length_mean",
        "loss on preferences": "preference/loss",
        "margin of implicit rewards": "preference/rewards/margins",
        "preferences ranked right": "preference/rewards/accuracies",
    }
    return {label: steps[key].tolist() for label, key in columns.items() if key in steps}


def read_comparison(evaluation: Path) -> dict[str, Any]:
    """Return `comparison.json` of an evaluation artifact; LineageError when it is unreadable."""
    path = evaluation / "comparison.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LineageError(
            f"{path} can't be read ({error}); the evaluation is incomplete, so nothing is "
            "promoted; run again with --overwrite-cache"
        ) from error
    if not isinstance(values, dict):
        raise LineageError(f"{path} is not a JSON object; run again with --overwrite-cache")
    return values


# The pages of a run that judged a model: its evaluation with the verdict, and its lineage. They are
# written into the run's folder at its end. The artifact `evaluation` has a page from before the
# decision; artifacts stay as they are.


def comparison_page(
    comparison: EvaluationComparison,
    rows: Mapping[str, pd.DataFrame],
    facts: Mapping[str, str | Link],
    policy: Path,
    parents: Sequence[Parent],
    harness: Sequence[tuple[HarnessScore, HarnessScore]],
    sets: Sequence[EvaluatedSet],
    verdict: Verdict | None,
) -> str:
    """Return the page of an evaluation whose manifest has these parents."""
    return render_report(
        comparison,
        rows_of_set(rows["warm_start"], TEST),
        rows_of_set(rows["rl"], TEST),
        facts=facts,
        curves=training_curves(policy),
        verdict=verdict,
        before=first_model(parents),
        after=trained_by(parents),
        overoptimisation=read_overoptimisation(policy),
        harness=harness,
        sets=sets,
    )


def write_pages(run: RunContext, promotion: Path) -> Path:
    """Write `report.html` and `lineage.html` of the model that the artifact `promotion` is about.

    They are shown as well. Returns the path of the report.
    """
    parents = {parent.name: parent for parent in read_manifest(promotion).parents}
    evaluation, policy = (local_path(parents[name].uri) for name in ("evaluation", "policy"))
    comparison = EvaluationComparison.from_dict(read_comparison(evaluation))
    digest, folder, sets = parents["policy"].digest, run_folder(run), read_sets(evaluation)
    graph = lineage_page(parents["policy"].uri, [parents["evaluation"].uri, str(promotion)])
    if graph:
        write_page(folder / LINEAGE, graph)
    facts = {
        "run": run.run_id,
        "data": f"{comparison.problems} held-out problems of {parents['dataset'].digest[:12]}",
        "known from training": "; ".join(f"{s.name}: {s.contamination}" for s in sets),
        **model_facts(digest, policy, page=bool(graph)),
    }
    page = comparison_page(
        comparison,
        {name: pd.read_parquet(evaluation / f"rows_{name}.parquet") for name in MODELS},
        facts,
        policy,
        read_manifest(evaluation).parents,
        read_harness(evaluation),
        sets,
        read_verdict(promotion),
    )
    write_page(folder / REPORT, page)
    host().show("Evaluation", page)
    if graph:
        host().show("Lineage", graph)
    return folder / REPORT


def read_harness(evaluation: Path) -> list[tuple[HarnessScore, HarnessScore]]:
    """Return both models' scores in the lm-evaluation-harness; none where it was not run."""
    file = evaluation / FILE
    if not file.is_file():
        return []
    return pairs(from_json(file.read_bytes(), str(file)), "warm_start", "rl")


def model_facts(digest: str, policy: Path, page: bool = False) -> dict[str, str | Link]:
    """Return the model's digest, its step of the RL run that made it, and its lineage.

    That is a page beside the report, or the command.
    """
    command = f"python -m engine.lineage {digest[:12]} --html {LINEAGE}"
    link = Link(f"{LINEAGE} (in a Deck: the tab Lineage)", LINEAGE)
    steps = read_policy_steps(policy)
    trained = {} if steps is None else {"step of training": str(steps)}
    return {"model": digest, **trained, "lineage": link if page else command}


def lineage_page(policy: str, stores: Sequence[str]) -> str:
    """Return the page of a model's lineage; empty, with a printed reason, where it can't be read.

    stores: where its descendants are looked for. All that the shared store holds would be more than
    the end of a run should read.
    """
    try:
        return render_page(review([policy], stores))
    except EngineError as error:
        say(f"report: there is no page of the lineage: {error}")
        return ""


def read_verdict(promotion: Path) -> Verdict:
    """Return what `decision.json` says, for a person."""
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
