"""Stage `evaluate`: two models on the same held-out problems, and the pages of such a run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from engine.config import ContaminationConfig, EvaluateConfig
from engine.console import Progress, progress, say
from engine.data.contract import EVALUATION_ROWS, check, check_disjoint
from engine.data.rows import prompt_text
from engine.data.sources import evaluation_files
from engine.data.templates import rows_spelling_control_tokens
from engine.data.tokenizer import load_tokenizer
from engine.errors import EngineError
from engine.evaluation import lm_eval, summary
from engine.evaluation.comparability import comparable_settings
from engine.evaluation.decode import uses_ranks
from engine.evaluation.policy_steps import read_overoptimisation, read_policy_steps
from engine.evaluation.report_page import Link, Verdict, render_report
from engine.evaluation.scoring import evaluate_model, share_of
from engine.lineage.lookup import review
from engine.lineage.page import render_page, write_page
from engine.promotion.gate import trained_on
from engine.rewards import scorer_identity
from engine.stages.dataset import SPLITS
from engine.stages.fetch import first_model, trained_by
from engine.stages.settings import EvaluationSettings, RunContext
from engine.stages.stage import Artifact, host, ray_for, run_folder, stage
from engine.storage.artifacts import Parent, local_path, read_manifest

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
    recorded = comparable_settings(data, config, seed)
    with stage("evaluation", run, recorded, on_ray=uses_ranks(config)) as this:
        folder = this.load_parent("dataset", dataset)
        problems = summary.read_problems(folder)
        # No test prompt may be in a split that a stage trained or chose on.
        check_disjoint({name: pd.read_parquet(folder / f"{name}.parquet") for name in SPLITS})
        # Of this machine, which may be another than the plan's.
        lm_eval.require_lm_eval(config.lm_eval)
        this.log_splits(folder, [path.stem for path in evaluation_files(folder).values()])
        models = {
            "warm_start": this.load_parent("warm_start", warm_start),
            "rl": this.load_parent("policy", policy),
        }
        if parts is None:
            rows = answer_problems(models, problems, settings)
        else:
            table = pd.concat(parts, ignore_index=True)
            rows = {n: table[table["model"] == n].reset_index(drop=True) for n in models}
        for name, frame in rows.items():
            check(frame, EVALUATION_ROWS, f"evaluation of {name}")
            frame.to_parquet(this.folder / f"rows_{name}.parquet", index=False)
        harness = harness_metrics(this.folder, models, config, seed)
        sets = summary.compare_sets(
            rows["warm_start"],
            rows["rl"],
            {name: known_from_training(folder, frame) for name, frame in problems.items()},
            config.k,
            config.confidence,
            config.bootstrap_samples,
            seed,
        )
        summary.write_sets(this.folder, sets)
        (this.folder / "comparison.json").write_text(sets[0].comparison.to_json())
        facts = {
            "run": run.run_id,
            "data": describe_problems(data.source, problems[summary.TEST], models["rl"]),
            "scorer": scorer_identity(config.scorer),
            "known from training": known_sentence(sets),
            **model_facts(this.parent("policy").digest, models["rl"]),
            "promotion": "decided after this page; then the run's report.html has the verdict",
        }
        page = evaluation_page(this.folder, models["rl"], this.parents, facts, None)
        (this.folder / "report.html").write_text(page)
        host().show("Evaluation", page)
        for line in (line for compared in sets for line in compared.lines()):
            say(f"evaluation: {line}")
        return this.publish(evaluation_metrics(sets) | harness)


def evaluation_metrics(sets: Sequence[summary.EvaluatedSet]) -> dict[str, float]:
    """Return rates and gains of the split `test`, of episodes, and of further evaluation sets."""
    comparison = sets[0].comparison
    gain = comparison.gain
    metrics = {
        "pass_at_1_warm_start": comparison.before.pass_at_1.mean,
        "pass_at_1_rl": comparison.after.pass_at_1.mean,
        "gain": gain.mean,
        "gain_low": gain.low,
        "gain_high": gain.high,
    }
    for episode in comparison.episodes:
        name = episode.name.replace(", ", "/").replace(" ", "_")
        metrics[f"episodes/{name}_rl"] = episode.after.mean
    for other in sets[1:]:
        metrics[f"{other.name}/pass_at_1_rl"] = other.comparison.after.pass_at_1.mean
        metrics[f"{other.name}/gain"] = other.comparison.gain.mean
    return metrics


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
    with ray_for(uses_ranks(config)):
        say(f"evaluation: part {part + 1} of {config.map_parts} starts")
        models = {"warm_start": warm_start.local(), "rl": policy.local()}
        problems = summary.read_problems(dataset.local())
        rows = answer_problems(models, problems, settings, (part, config.map_parts))
        return pd.concat(list(rows.values()), ignore_index=True)


def answer_problems(
    models: Mapping[str, Path],
    problems: Mapping[str, pd.DataFrame],
    settings: EvaluationSettings,
    part: tuple[int, int] = (0, 1),
) -> dict[str, pd.DataFrame]:
    """Return each model's rows, with a progress bar."""
    data, config = settings.data, settings.config
    share = share_of(sum(map(len, problems.values())), part)
    each = (share.stop - share.start) * (1 + config.samples)
    rows: dict[str, pd.DataFrame] = {}
    bar: Progress[None] = progress(len(models) * each, "evaluate", "answer")
    with bar:
        for name, folder in models.items():

            def report(done: int, start: int = len(rows) * each) -> None:
                bar.update(start + done - bar.count)

            rows[name] = evaluate_model(
                folder,
                problems,
                name,  # type: ignore[arg-type]
                config,
                max_response_length=data.max_response_length,
                max_prompt_length=data.max_prompt_length,
                seed=settings.seed,
                part=part,
                on_progress=report,
            )
    return rows


def harness_metrics(
    folder: Path, models: Mapping[str, Path], config: EvaluateConfig, seed: int
) -> dict[str, float]:
    """Run the lm-evaluation-harness on each model, as configured, and write `lm_eval.json`.

    Returns its scores as metrics of the stage: the RL model's by their names.
    """
    scores: dict[str, list[lm_eval.HarnessScore]] = {}
    if not config.lm_eval.tasks:
        return {}
    for name, model in models.items():
        with tempfile.TemporaryDirectory(prefix="hybridflyte-lm-eval-") as scratch:
            scores[name] = lm_eval.run_lm_eval(model, config.lm_eval, seed, Path(scratch))
        line = ", ".join(f"{s.task} {s.metric} {s.value:.4g}" for s in scores[name])
        say(f"evaluation: lm-evaluation-harness on {name}: {line}")
    (folder / lm_eval.FILE).write_text(lm_eval.to_json(scores, config.confidence))
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


def evaluation_page(
    evaluation: Path,
    policy: Path,
    parents: Sequence[Parent],
    facts: Mapping[str, str | Link],
    verdict: Verdict | None,
) -> str:
    """Return the page of an evaluation that has all other files, and whose parents these are."""
    harness = evaluation / lm_eval.FILE
    scores = lm_eval.from_json(harness.read_bytes(), str(harness)) if harness.is_file() else {}
    tables = (pd.read_parquet(evaluation / f"rows_{name}.parquet") for name in MODELS)
    sets = summary.read_sets(evaluation)
    return render_report(
        sets[0].comparison,
        *(summary.rows_of_set(table, summary.TEST) for table in tables),
        facts=facts,
        curves=training_curves(policy),
        verdict=verdict,
        before=first_model(parents),
        after=trained_by(parents),
        overoptimisation=read_overoptimisation(policy),
        harness=lm_eval.pairs(scores, *MODELS),
        sets=sets,
    )


def known_sentence(sets: Sequence[summary.EvaluatedSet]) -> str:
    """Say how much of each evaluation set is known from training."""
    return "; ".join(f"{s.name}: {s.contamination}" for s in sets)


def write_pages(run: RunContext, promotion: Path) -> Path:
    """Write `report.html` and `lineage.html` of the model that the artifact `promotion` is about.

    They go into the run's folder and are shown as well: artifacts stay as they are, and the page in
    `evaluation` is from before the decision. Returns the path of the report.
    """
    parents = {parent.name: parent for parent in read_manifest(promotion).parents}
    evaluation, policy = (local_path(parents[name].uri) for name in ("evaluation", "policy"))
    folder, sets, graph = run_folder(run), summary.read_sets(evaluation), ""
    # All that the shared store holds would be more than the end of a run should read.
    stores = [parents["evaluation"].uri, str(promotion)]
    try:
        graph = render_page(review([parents["policy"].uri], stores))
        write_page(folder / LINEAGE, graph)
    except EngineError as error:
        say(f"report: there is no page of the lineage: {error}")
    problems, dataset = sets[0].comparison.problems, parents["dataset"].digest[:12]
    facts = {
        "run": run.run_id,
        "data": f"{problems} held-out problems of {dataset}",
        "known from training": known_sentence(sets),
        **model_facts(parents["policy"].digest, policy, page=bool(graph)),
    }
    made_of, verdict = read_manifest(evaluation).parents, read_verdict(promotion)
    page = evaluation_page(evaluation, policy, made_of, facts, verdict)
    write_page(folder / REPORT, page)
    host().show("Evaluation", page)
    if graph:
        host().show("Lineage", graph)
    return folder / REPORT


def model_facts(digest: str, policy: Path, page: bool = False) -> dict[str, str | Link]:
    """Return the model's digest, its step of the RL run that made it, and its lineage.

    That is a page beside the report, or the command.
    """
    command = f"python -m engine.lineage {digest[:12]} --html {LINEAGE}"
    link = Link(f"{LINEAGE} (in a Deck: the tab Lineage)", LINEAGE)
    steps = read_policy_steps(policy)
    trained = {} if steps is None else {"step of training": str(steps)}
    return {"model": digest, **trained, "lineage": link if page else command}


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
