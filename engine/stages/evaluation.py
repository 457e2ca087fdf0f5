"""Stages that say what a model is worth: `evaluate`, the pages and end of a run, and `review`."""

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from engine.config import ContaminationConfig, EvaluateConfig
from engine.console import Progress, display_path, human_time, points, say, table
from engine.data.contract import EVALUATION_ROWS, check, check_disjoint
from engine.data.control_tokens import rows_spelling_control_tokens
from engine.data.rows import prompt_text
from engine.data.sources import SPLITS, evaluation_files
from engine.errors import EngineError, LineageError
from engine.evaluation import drift, lm_eval, summary
from engine.evaluation.comparability import comparable_settings
from engine.evaluation.policy_steps import read_overoptimisation, read_policy_steps
from engine.evaluation.report_page import Link, Verdict, render_report
from engine.evaluation.results import ModelName, read_rows
from engine.lineage import lookup
from engine.lineage.audit import audit
from engine.lineage.compare import compare
from engine.lineage.page import render_page
from engine.promotion.gate import trained_on, training_prompts
from engine.redaction import redact
from engine.rewards import scorer_identity, scorer_label
from engine.rewards.audit import audit_line
from engine.stages import reward_audit
from engine.stages.fetch import START_MODEL, first_model, trained_by
from engine.stages.promotion import read_decision
from engine.stages.settings import EvaluationSettings, RunContext
from engine.stages.stage import Artifact, host, ray_for, run_folder, shared, show_facts, stage
from engine.storage.artifacts import Parent, local_path, read_manifest
from engine.storage.filesystem import home, write_text
from engine.storage.signatures import trusted_keys
from engine.tracking import Tracker
from engine.tracking.connection import default_uri

REPORT, LINEAGE = "report.html", "lineage.html"
MODELS = ("warm_start", "rl")
FREE_SPACE = "free space or set HYBRIDFLYTE_HOME"
NEAR_ZERO = 0.02  # pass@1, a fraction
POLICY = "rl"  # the trained policy's key in the summary, whatever trained it
LEARNED_FROM = ("pairs", "reference", "reward_model")  # kinds of a policy's parents
SHOWN_FAULTS = 5


def evaluate(
    run: RunContext,
    settings: EvaluationSettings,
    dataset: Artifact,
    warm_start: Artifact,
    policy: Artifact,
    audit: Artifact | None = None,
    parts: Iterable[pd.DataFrame] | None = None,
) -> Artifact:
    """Compare the two models by greedy pass@1, pass@k, majority vote, format and length.

    Artifact `evaluation`: `rows_warm_start.parquet`, `rows_rl.parquet` (schema `EVALUATION_ROWS`),
    `comparison.json` (rates with intervals, the paired gain, on the split `test`), `sets.json` (the
    same of every evaluation set, by source and level, and what is known from training),
    `report.html`, and with `evaluate.lm_eval.tasks` `lm_eval.json`. audit: of the scorers. parts:
    the tables of `evaluate_part` in order; None: both models are decoded here.
    """
    from engine.evaluation.decode import uses_ranks  # torch takes seconds, and a report needs none

    data, config, seed = settings.data, settings.config, settings.seed
    recorded = comparable_settings(data, config, seed)
    with stage("evaluation", run, recorded, on_ray=uses_ranks(config)) as this:
        folder = this.load_parent("dataset", dataset)
        if audit is not None:
            audited = this.load_parent(reward_audit.KIND, audit)
            this.config["reward_audit"] = reward_audit.audit_record(audited, this.parent("dataset"))
        problems = summary.read_problems(folder)
        # No test prompt may be in a split that a stage trained or chose on.
        check_disjoint({name: pd.read_parquet(folder / f"{name}.parquet") for name in SPLITS})
        # Of this machine, which may be another than the plan's.
        lm_eval.require_lm_eval(config.lm_eval)
        this.log_splits(folder, [path.stem for path in evaluation_files(folder).values()])
        models: dict[ModelName, Path] = {
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
            known_from_training(folder, problems),
            summary.Statistics(config.k, config.confidence, seed),
        )
        summary.write_sets(this.folder, sets)
        (this.folder / "comparison.json").write_text(sets[0].comparison.to_json())
        facts = {
            "run": run.run_id,
            "data": describe_problems(data.source, problems[summary.TEST], models["rl"]),
            "scorer": scorer_identity(config.scorer),
            "known from training": "; ".join(f"{s.name}: {s.contamination}" for s in sets),
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
    metrics = dict(zip(("gain", "gain_low", "gain_high"), gain, strict=True))
    metrics["pass_at_1_warm_start"] = comparison.before.pass_at_1.mean
    metrics["pass_at_1_rl"] = comparison.after.pass_at_1.mean
    for episode in comparison.episodes:
        name = episode.name.replace(", ", "/").replace(" ", "_")
        metrics[f"episodes/{name}_rl"] = episode.after.mean
    for other in sets[1:]:
        metrics[f"{other.name}/pass_at_1_rl"] = other.comparison.after.pass_at_1.mean
        metrics[f"{other.name}/gain"] = other.comparison.gain.mean
    return metrics


def evaluate_part(
    part: int,
    run: RunContext,
    settings: EvaluationSettings,
    dataset: Artifact,
    warm_start: Artifact,
    policy: Artifact,
) -> pd.DataFrame:
    """Return both models' rows of one share of the problems, `part` of `config.map_parts`."""
    from engine.evaluation.decode import uses_ranks

    config = settings.config
    with ray_for(uses_ranks(config)):
        say(f"evaluation: part {part + 1} of {config.map_parts} starts")
        models: dict[ModelName, Path] = {"warm_start": warm_start.local(), "rl": policy.local()}
        problems = summary.read_problems(dataset.local())
        rows = answer_problems(models, problems, settings, (part, config.map_parts))
        return pd.concat(list(rows.values()), ignore_index=True)


def answer_problems(
    models: Mapping[ModelName, Path],
    problems: Mapping[str, pd.DataFrame],
    settings: EvaluationSettings,
    part: tuple[int, int] = (0, 1),
) -> dict[str, pd.DataFrame]:
    """Return each model's rows, with a progress bar."""
    from engine.evaluation.scoring import evaluate_model, share_of

    data, config = settings.data, settings.config
    share = share_of(sum(map(len, problems.values())), part)
    each = (share.stop - share.start) * (1 + config.samples)
    rows: dict[str, pd.DataFrame] = {}
    with Progress(len(models) * each, "evaluation", "answer") as bar:
        for name, folder in models.items():

            def report(done: int, start: int = len(rows) * each) -> None:
                bar.update(start + done - bar.count)

            rows[name] = evaluate_model(
                folder, problems, name, config, max_response_length=data.max_response_length,
                max_prompt_length=data.max_prompt_length, seed=settings.seed, part=part,
                on_progress=report,
            )  # fmt: skip
    return rows


def harness_metrics(
    folder: Path, models: Mapping[ModelName, Path], config: EvaluateConfig, seed: int
) -> dict[str, float]:
    """Run the lm-evaluation-harness on each model, if configured; return its scores as metrics."""
    scores: dict[str, list[lm_eval.HarnessScore]] = {}
    for name, model in models.items() if config.lm_eval.tasks else ():
        with tempfile.TemporaryDirectory(prefix="hybridflyte-lm-eval-") as scratch:
            scores[name] = lm_eval.run_lm_eval(model, config.lm_eval, seed, Path(scratch))
        line = ", ".join(f"{s.task} {s.metric} {s.value:.4g}" for s in scores[name])
        say(f"evaluation: lm-evaluation-harness on {name}: {line}")
    if scores:
        (folder / lm_eval.FILE).write_text(lm_eval.to_json(scores, config.confidence))
    return {
        score.key if name == "rl" else f"{score.key}_{name}": score.value
        for name, model_scores in scores.items()
        for score in model_scores
    }


def describe_problems(source: str, test: pd.DataFrame, model: Path) -> str:
    """Say where the problems are from, how many, and how many spell control tokens."""
    from engine.data.tokenizer import load_tokenizer

    rows = [{"prompt": prompt} for prompt in test["prompt"]]
    spelled = rows_spelling_control_tokens(rows, load_tokenizer(model), "escape", "test")
    escaped = f", {len(spelled)} of them with control tokens kept as plain text" * bool(spelled)
    return f"{source}, {len(test)} held-out problems{escaped}"


def known_from_training(dataset: Path, problems: Mapping[str, pd.DataFrame]) -> dict[str, int]:
    """Count by set the prompts that were trained on, by the words of promotion's default rule."""
    rule = ContaminationConfig()
    texts = [prompt_text(prompt) for frame in problems.values() for prompt in frame["prompt"]]
    known = iter(trained_on(texts, training_prompts([dataset]), rule.ngram, rule.overlap))
    return {name: sum(islice(known, len(frame))) for name, frame in problems.items()}


def training_curves(policy: Path) -> dict[str, list[float]]:
    """Return the per-step metrics of training that made the model; empty where it is not known."""
    run = read_policy_steps(policy)
    columns = {
        "reward": "reward/mean",
        "KL": "actor/kl",
        "entropy": "actor/entropy",
        "response length": "response/length_mean",
        "loss on preferences": "preference/loss",
        "margin of implicit rewards": "preference/rewards/margins",
        "preferences ranked right": "preference/rewards/accuracies",
    }
    if run is None:
        return {}
    return {label: run.rows[key].tolist() for label, key in columns.items() if key in run.rows}


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
    tables = (read_rows(evaluation, name) for name in MODELS)
    sets = summary.read_sets(evaluation)
    before, after = (summary.rows_of_set(table, summary.TEST) for table in tables)
    steps, audited = read_policy_steps(policy), reward_audit.audit_folder(parents)
    return render_report(
        sets[0].comparison,
        before,
        after,
        facts=facts,
        curves=training_curves(policy),
        verdict=verdict,
        before=first_model(parents),
        after=trained_by(parents),
        overoptimisation=read_overoptimisation(policy),
        harness=lm_eval.pairs(scores, *MODELS),
        sets=sets,
        audits={who: a for f in audited.values() for who, a in reward_audit.read_audits(f).items()},
        drift={} if steps is None else drift.raised(steps.rows),
    )


def write_pages(run: RunContext, promotion: Path) -> Path:
    """Write and show `report.html` and `lineage.html` of the model that `promotion` is about."""
    parents = {parent.name: parent for parent in read_manifest(promotion).parents}
    evaluation, policy = (local_path(parents[name].uri) for name in ("evaluation", "policy"))
    folder, sets, graph = run_folder(run), summary.read_sets(evaluation), ""
    # All that the shared store holds would be more than the end of a run should read.
    stores = [parents["evaluation"].uri, str(promotion)]
    try:
        graph = render_page(lookup.review([parents["policy"].uri], stores))
        write_text(folder / LINEAGE, graph, FREE_SPACE)
    except EngineError as error:
        say(f"report: there is no page of the lineage: {error}")
    problems, dataset = sets[0].comparison.problems, parents["dataset"].digest[:12]
    facts = {
        "run": run.run_id,
        "data": f"{problems} held-out problems of {dataset}",
        "known from training": "; ".join(f"{s.name}: {s.contamination}" for s in sets),
        **model_facts(parents["policy"].digest, policy, page=bool(graph)),
    }
    made_of, verdict = read_manifest(evaluation).parents, verdict_of(read_decision(promotion))
    page = evaluation_page(evaluation, policy, made_of, facts, verdict)
    write_text(folder / REPORT, page, FREE_SPACE)
    host().show("Evaluation", page)
    if graph:
        host().show("Lineage", graph)
    return folder / REPORT


def model_facts(digest: str, policy: Path, page: bool = False) -> dict[str, str | Link]:
    """Return the model's digest, its step of RL, and its lineage: a page here, or the command."""
    command = f"python -m engine.lineage {digest[:12]} --html {LINEAGE}"
    link = Link(f"{LINEAGE} (in a Deck: the tab Lineage)", LINEAGE)
    steps = read_policy_steps(policy)
    trained = {} if steps is None else {"step of training": str(steps)}
    return {"model": digest, **trained, "lineage": link if page else command}


def verdict_of(decision: Mapping[str, Any]) -> Verdict:
    """Return a decision as a sentence with its reason."""
    version = f"{decision['model_name']} version {decision['model_version']}"
    holds = decision["promoted"] or decision["previous_champion"] == decision["model_version"]
    if holds:
        title = f"{version} {'is now' if decision['promoted'] else 'stays'} {decision['alias']}"
    elif decision["waits_for_approval"]:
        title = f"{version} waits for approval"
    else:
        title = f"{version} was not promoted"
    return Verdict(holds, title, decision["reason"])


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
        **reward_audit.audit_folder(read_manifest(evaluation.local()).parents),
        **made_before(trained),
        POLICY: trained,
        "evaluation": evaluation.local(),
        "promotion": promotion.local(),
    }
    facts = summarise(run, config_digest, folders)
    facts["report"] = str(write_pages(run, folders["promotion"]))
    path = write_summary(run, facts)
    metrics = evaluation_metrics(summary.read_sets(folders["evaluation"]))
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


def summarise(run: RunContext, config_digest: str, folders: dict[str, Path]) -> dict[str, object]:
    """Collect the run's facts from its artifacts."""
    manifests = {name: read_manifest(folder) for name, folder in folders.items()}
    start = manifests["sft"].config.get("model")
    comparison = summary.read_sets(folders["evaluation"])[0].comparison
    decision = read_decision(folders["promotion"])
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
        # From the cache, or computed again with the same result; `seconds` are of the earlier run.
        "unchanged": [n for n, m in manifests.items() if m.flyte_execution != execution],
        "config_digest": config_digest,
        "digests": {name: manifest.digest for name, manifest in manifests.items()},
        "artifacts": {name: str(folder) for name, folder in folders.items()},
        "promotion": decision,
        "reward_audit": manifests["evaluation"].config.get("reward_audit", []),
        "mlflow": {
            "tracking_uri": redact(default_uri()),
            "experiment": run.experiment,
            "run_id": run.mlflow_run,
            "url": run.mlflow_url,  # its page on a server; empty for a store without one
        },
    }


def write_summary(run: RunContext, facts: dict[str, object]) -> Path:
    """Write `runs/<run id>/summary.json` whole or not at all."""
    path = run_folder(run) / "summary.json"
    write_text(path, f"{json.dumps(facts, indent=2)}\n", FREE_SPACE)
    return path


def print_summary(facts: dict[str, Any], path: Path, folders: dict[str, Path]) -> None:
    """Print the summary table and where to look further."""

    def rate(name: str) -> str:
        low, high = facts["pass_at_1_interval"][name]
        return f"{facts['pass_at_1'][name]:.1%}  [{low:.1%}, {high:.1%}]"

    low, high = facts["gain_interval"]
    times = ", ".join(
        f"{facts['trained_by'] if name == POLICY else name} "
        f"{'unchanged' if name in facts['unchanged'] else human_time(seconds)}"
        for name, seconds in facts["seconds"].items()
        if name != "total"
    )
    decision = facts["promotion"]
    method = "preferences" if facts["trained_by"] == "preference" else "RL"
    first = "warm start" if facts["warm_start"] else "start model"
    rows = {
        f"pass@1 {first}": rate("warm_start"),
        f"pass@1 after {method}": rate("rl"),
        "gain": f"{points((facts['gain'], low, high))} on {facts['problems']} problems",
        **{
            f"reward audit ({scorer_label(a['scorer'])})": audit_line(a)
            for a in facts["reward_audit"]
        },
        "promotion": f"{verdict_of(facts['promotion']).title} (why: below)",
        "time": f"{human_time(facts['seconds']['total'])} ({times})",
        **({} if facts["warm_start"] else {"start model": facts["start_model"]}),
        "model's step": facts["policy_step"] or "not recorded",
    }
    places = {  # to be copied, so that no column may break them
        "model": display_path(folders[POLICY]),
        "report": display_path(Path(facts["report"])),
        "summary": display_path(path),
        "MLflow run": f"{facts['mlflow']['run_id']} in {facts['mlflow']['experiment']!r}",
        "MLflow UI": facts["mlflow"]["url"]
        or f"mlflow ui --backend-store-uri {facts['mlflow']['tracking_uri']}",
        "lineage": f"python -m engine.lineage {display_path(folders[POLICY])}",
    }
    episodes = summary.read_sets(folders["evaluation"])[0].comparison.episodes
    kind = "Preference" if facts["trained_by"] == "preference" else "RLHF"
    title = f"{'Agents' if episodes else kind} run {facts['run_id']}"
    table(title, [{"": k, "result": v} for k, v in rows.items()])
    for name, place in places.items():
        say(f"{name}: {place}")
    for episode in episodes:
        say(f"episodes: {episode.line()}")
    if "reward_model" in folders:
        say(f"reward model: {ranking(read_manifest(folders['reward_model']).metrics)}")
    if learned := read_overoptimisation(folders[POLICY]):
        say(f"over-optimisation: {learned.sentence()}")
    say(f"promotion: {decision['reason']}")  # too long for a table's column
    if max(facts["pass_at_1"].values()) < NEAR_ZERO:
        start = facts["start_model"]
        names = {"": "a model this small, from scratch,", None: "the model that RL started from"}
        say(
            f"Both models are near 0: {names.get(start, f'the start model {start}')} solves almost "
            "none of these problems. Look at its answers in the report, and start from a stronger "
            "model with --model FOLDER."
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
    """End the run with the artifact's metrics, and a promotion's pages; return the artifact."""
    folder = artifact.local()
    manifest = read_manifest(folder)
    if manifest.kind == "promotion":
        say(f"run {run.run_id}: report in {display_path(write_pages(run, folder))}")
    unchanged = manifest.flyte_execution != (host().execution or run.run_id)
    if manifest.kind == "evaluation" and unchanged:  # from the cache, it has said nothing here
        for line in (line for one in summary.read_sets(folder) for line in one.lines()):
            say(f"evaluation: {line}")
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


def review(
    artifact: str, against: str, store: str, verify_content: bool, require_signatures: bool = False
) -> Path:
    """Write the page of an artifact's lineage; LineageError, with the page shown, on tampering.

    `against` (empty: nothing) is compared with it, `store` (empty: the one it lies in) is searched.
    With `verify_content`, all that it was made from and that came of it is re-hashed. With
    `require_signatures` each must be signed by a key in `$HYBRIDFLYTE_PUBLIC_KEYS`, too.
    """
    trusted = trusted_keys() if require_signatures else None
    lineage = lookup.review([*filter(None, [against]), artifact], [store] if store else [])
    starts = lineage.starts
    comparison = compare(lineage.graph, starts[0], starts[-1]) if against else None
    checked = audit(lineage, trusted) if verify_content or require_signatures else None
    page = render_page(lineage, checked, comparison)
    host().show("Lineage", page)
    folder = home() / "reviews"
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="review-", dir=folder)) / LINEAGE
    write_text(path, page, FREE_SPACE)
    for finding in checked.findings if checked else ():
        say(f"review: {'FAULT' if finding.is_fault else 'note'}: {finding.text}")
    say(f"review: {lineage.summary} → {path}")
    if checked is not None and checked.faults:
        host().publish_pages()
        texts = "; ".join(finding.text for finding in checked.faults[:SHOWN_FAULTS])
        more = len(checked.faults) - SHOWN_FAULTS
        raise LineageError(texts + (f"; and {more} more" if more > 0 else ""))
    return path
