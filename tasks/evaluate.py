"""Task `evaluate`: two models on the same held-out problems, in one part or several."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flytekit import Deck, StructuredDataset, map_task
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, EvaluateConfig
from tasks.context import LARGE, RunContext, echo, local_artifact, user_facing_errors
from tasks.fetch import first_model, trained_by
from tasks.preprocess import SPLITS, log_splits
from tasks.profiles import Profile
from tasks.stage import DECK, EvaluationRows, TableFile, as_table, open_table, stage, stage_cache
from tasks.variants import LOCAL_OBJECT_STORE_BYTES, on_profiles, stages_of

if TYPE_CHECKING:
    import pandas as pd

    from engine.console import Progress
    from engine.evaluation.lm_eval import HarnessScore
    from engine.evaluation.report_page import Link, Verdict


# The pages of a run that judged a model: its evaluation with the verdict, and its lineage.
#
# The artifact `evaluation` has a page of its own, made before anything was decided. These are
# written
# at the end of the run, into its folder; artifacts stay as they are.

REPORT, LINEAGE = "report.html", "lineage.html"


def run_folder(run: RunContext) -> Path:
    """Where a run leaves what is no artifact: its summary and its pages."""
    from engine.errors import StorageError
    from engine.storage.filesystem import home

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

    from engine.evaluation.policy_steps import read_overoptimisation
    from engine.evaluation.report_page import render_report
    from engine.evaluation.summary import TEST, EvaluationComparison, read_sets, rows_of_set
    from engine.lineage.page import write_page
    from engine.storage.artifacts import local_path, read_manifest

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
    from engine.evaluation.report_page import Link

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
    from engine.lineage.lookup import review
    from engine.lineage.page import render_page

    try:
        return render_page(review([policy], stores))
    except EngineError as error:
        echo(f"report: there is no page of the lineage: {error}")
        return ""


def read_verdict(promotion: Path) -> Verdict:
    """What `decision.json` says, for a person."""
    from engine.evaluation.report_page import Verdict

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


# Evaluation on several machines that need not start together: a map task over shares of problems.
#
# With `evaluate.map_parts` the dynamic task `evaluate` runs `evaluate_part` so many times, each in
# a
# pod of the profile, and `evaluate` reads their tables instead of decoding. Both models answer the
# same share, so the tables are those of one machine, to the bit where its arithmetic is.


@stages_of(
    cache=stage_cache(),
    requests=LARGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=6),
)
def evaluate_part(
    part: int,
    run: RunContext,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    policy: FlyteDirectory,
    data: DataConfig,
    config: EvaluateConfig,
    seed: int,
) -> EvaluationRows:
    """Both models' rows of one share of the problems, `part` of `config.map_parts`."""
    import pandas as pd

    from engine.controller.launch import ray_session
    from engine.evaluation.decode import uses_ranks
    from engine.evaluation.summary import read_problems

    share = (part, config.map_parts)
    ray = ray_session("ray" if uses_ranks(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with user_facing_errors(), ray:
        echo(f"evaluation: part {part + 1} of {config.map_parts} starts")
        models = {"warm_start": local_artifact(warm_start), "rl": local_artifact(policy)}
        problems = read_problems(local_artifact(dataset))
        rows = answer_problems(models, problems, data, config, seed, share)
        return as_table(TableFile.write(pd.concat(list(rows.values()), ignore_index=True)))


def parts_of(profile: Profile, inputs: Mapping[str, Any]) -> Any:
    """The parts' tables, by a map task; None without parts. For `on_profiles(made_inside=…)`."""
    parts = inputs["config"].map_parts
    if parts == 1:
        return None
    return map_task(partial(evaluate_part(profile), **inputs))(part=list(range(parts)))


def joined(parts: Sequence[StructuredDataset], models: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The tables of all problems, by model, from those of the parts in order."""
    import pandas as pd

    from engine.data.contract import EVALUATION_ROWS

    read = [
        open_table(table).read(EVALUATION_ROWS, f"part {number + 1} of the evaluation")
        for number, table in enumerate(parts)
    ]
    rows = pd.concat(read, ignore_index=True)
    return {name: rows[rows["model"] == name].reset_index(drop=True) for name in models}


def answer_problems(
    models: Mapping[str, Path],
    problems: Mapping[str, pd.DataFrame],
    data: DataConfig,
    config: EvaluateConfig,
    seed: int,
    part: tuple[int, int] = (0, 1),
) -> dict[str, pd.DataFrame]:
    """Each model's rows, with a progress bar."""
    from engine.console import progress
    from engine.evaluation.scoring import evaluate_model, share_of

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
    """A callback that sets the bar to `offset` plus the finished completions of one model."""
    return lambda done: bar.update(offset + done - bar.count)


# Task `evaluate`: the warm start and the RL model on the same held-out problems.
#
# Artifact `evaluation`: `rows_warm_start.parquet`, `rows_rl.parquet` (schema `EVALUATION_ROWS`),
# `comparison.json` (rates with intervals, the paired gain, on the split `test`), `sets.json` (the
# same of every evaluation set, by source and level, and what is known from training),
# `report.html`
# (also the task's Deck), and with `evaluate.lm_eval.tasks` `lm_eval.json`.


class Evaluation(NamedTuple):
    """The artifact, which the gate reads, and its tables, which people look at in the console."""

    evaluation: FlyteDirectory
    rows_warm_start: EvaluationRows
    rows_rl: EvaluationRows


@on_profiles(
    cache=stage_cache(),
    requests=LARGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=6),
    made_inside={"parts": parts_of},
    **DECK,
)
def evaluate(
    run: RunContext,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    policy: FlyteDirectory,
    data: DataConfig,
    config: EvaluateConfig,
    seed: int,
    parts: list[StructuredDataset] | None = None,
) -> Evaluation:
    """Compare the two models by greedy pass@1, pass@k, majority vote, format and length.

    parts: what a map task has decoded (`tasks.evaluate`); None: both models are decoded here.
    """

    from engine.controller.launch import ray_session
    from engine.data.contract import EVALUATION_ROWS, check
    from engine.data.sources import evaluation_files
    from engine.evaluation.comparability import comparable_settings
    from engine.evaluation.decode import uses_ranks
    from engine.evaluation.lm_eval import pairs, require_lm_eval
    from engine.evaluation.policy_steps import read_overoptimisation
    from engine.evaluation.report_page import render_report
    from engine.evaluation.summary import TEST, compare_sets, read_problems, rows_of_set, write_sets
    from engine.rewards import scorer_identity

    ray = ray_session("ray" if uses_ranks(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with stage("evaluation", run, comparable_settings(data, config, seed)) as this, ray:
        data_folder = this.load_parent("dataset", dataset)
        problems = read_problems(data_folder)
        check_held_out(data_folder)
        require_lm_eval(config.lm_eval)  # of this machine, which may be another than the plan's
        log_splits(
            this, data_folder, [path.stem for path in evaluation_files(data_folder).values()]
        )
        models = {
            "warm_start": this.load_parent("warm_start", warm_start),
            "rl": this.load_parent("policy", policy),
        }
        if parts:
            rows = joined(parts, list(models))
        else:
            rows = answer_problems(models, problems, data, config, seed)
        for name, frame in rows.items():
            check(frame, EVALUATION_ROWS, f"evaluation of {name}")
            frame.to_parquet(this.folder / f"rows_{name}.parquet", index=False)
        harness = harness_scores(this.folder, models, config, seed)
        sets = compare_sets(
            rows["warm_start"],
            rows["rl"],
            {name: known_from_training(data_folder, frame) for name, frame in problems.items()},
            config.k,
            config.confidence,
            config.bootstrap_samples,
            seed,
        )
        write_sets(this.folder, sets)
        comparison = sets[0].comparison
        (this.folder / "comparison.json").write_text(comparison.to_json())
        page = render_report(
            comparison,
            rows_of_set(rows["warm_start"], TEST),
            rows_of_set(rows["rl"], TEST),
            facts={
                "run": run.run_id,
                "data": describe_problems(data.source, problems[TEST], models["rl"]),
                "scorer": scorer_identity(config.scorer),
                "known from training": "; ".join(
                    f"{one.name}: {one.contamination}" for one in sets
                ),
                **model_facts(this.parent("policy").digest, models["rl"]),
                "promotion": "decided after this page; then the run's report.html has the verdict",
            },
            curves=training_curves(models["rl"]),
            before=first_model(this.parents),
            after=trained_by(this.parents),
            overoptimisation=read_overoptimisation(models["rl"]),
            harness=pairs(harness, "warm_start", "rl"),
            sets=sets,
        )
        (this.folder / "report.html").write_text(page)
        Deck("Evaluation", page)
        for line in (line for one in sets for line in one.lines()):
            echo(f"evaluation: {line}")
        published = this.publish(
            {
                "pass_at_1_warm_start": comparison.before.pass_at_1.mean,
                "pass_at_1_rl": comparison.after.pass_at_1.mean,
                "gain": comparison.gain.mean,
                "gain_low": comparison.gain.low,
                "gain_high": comparison.gain.high,
                **harness_metrics(harness),
            }
            | {
                f"episodes/{one.name.replace(', ', '/').replace(' ', '_')}_rl": one.after.mean
                for one in comparison.episodes
            }
            | {f"{one.name}/pass_at_1_rl": one.comparison.after.pass_at_1.mean for one in sets[1:]}
            | {f"{one.name}/gain": one.comparison.gain.mean for one in sets[1:]}
        )
        tables = (this.table(f"rows_{name}.parquet") for name in models)
        return Evaluation(published, *tables)


def harness_scores(
    folder: Path, models: Mapping[str, Path], config: EvaluateConfig, seed: int
) -> dict[str, list[HarnessScore]]:
    """Run the lm-evaluation-harness on each model, as configured, and write `lm_eval.json`."""
    from engine.evaluation.lm_eval import FILE, run_lm_eval, to_json

    scores: dict[str, list[HarnessScore]] = {}
    if not config.lm_eval.tasks:
        return scores
    for name, model in models.items():
        with tempfile.TemporaryDirectory(prefix="hybridflyte-lm-eval-") as scratch:
            scores[name] = run_lm_eval(model, config.lm_eval, seed, Path(scratch))
        shown = ", ".join(f"{one.task} {one.metric} {one.value:.4g}" for one in scores[name])
        echo(f"evaluation: lm-evaluation-harness on {name}: {shown}")
    (folder / FILE).write_text(to_json(scores, config.confidence))
    return scores


def harness_metrics(scores: Mapping[str, Sequence[HarnessScore]]) -> dict[str, float]:
    """The harness's scores as metrics of the stage: the RL model's by their names."""
    return {
        score.key if name == "rl" else f"{score.key}_{name}": score.value
        for name, found in scores.items()
        for score in found
    }


def describe_problems(source: str, test: pd.DataFrame, model: Path) -> str:
    """Where the problems are from, how many, and how many spell control tokens, if any do."""
    from engine.data.templates import rows_spelling_control_tokens
    from engine.data.tokenizer import load_tokenizer

    rows = [{"prompt": prompt} for prompt in test["prompt"]]
    spelled = rows_spelling_control_tokens(rows, load_tokenizer(model), "escape", "test")
    escaped = f", {len(spelled)} of them with control tokens kept as plain text" * bool(spelled)
    return f"{source}, {len(test)} held-out problems{escaped}"


def known_from_training(dataset: Path, test: pd.DataFrame) -> int:
    """How many of these prompts were trained on, by the words of the promotion rule's defaults."""
    import pandas as pd

    from engine.config import ContaminationConfig
    from engine.data.rows import prompt_text
    from engine.promotion.gate import trained_on

    rule = ContaminationConfig()
    frames = (pd.read_parquet(dataset / f"{name}.parquet") for name in ("sft_train", "train"))
    training = (prompt_text(prompt) for frame in frames for prompt in frame["prompt"])
    texts = [prompt_text(prompt) for prompt in test["prompt"]]
    return sum(trained_on(texts, training, rule.ngram, rule.overlap))


def check_held_out(dataset: Path) -> None:
    """Raise DataError when a test prompt is in any split that a stage trained or chose on."""
    import pandas as pd

    from engine.data.contract import check_disjoint

    check_disjoint({name: pd.read_parquet(dataset / f"{name}.parquet") for name in SPLITS})


def training_curves(policy: Path) -> dict[str, list[float]]:
    """Per-step metrics of the training that made the model; empty where it is not known."""
    from engine.evaluation.policy_steps import read_policy_steps

    run = read_policy_steps(policy)
    if run is None:
        return {}
    steps = run.rows
    wanted = {
        "reward": "reward/mean",
        "KL": "actor/kl",
        "entropy": "actor/entropy",
        "response length": "response/length_mean",
        "loss on preferences": "preference/loss",
        "margin of implicit rewards": "preference/rewards/margins",
        "preferences ranked right": "preference/rewards/accuracies",
    }
    return {label: steps[key].tolist() for label, key in wanted.items() if key in steps}


def read_comparison(evaluation: Path) -> dict[str, Any]:
    """Return `comparison.json` of an evaluation artifact; LineageError when it is unreadable."""
    from engine.errors import LineageError

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
