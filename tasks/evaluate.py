"""Task `evaluate`: the warm start and the RL model on the same held-out problems.

Artifact `evaluation`: `rows_warm_start.parquet`, `rows_rl.parquet` (schema `EVALUATION_ROWS`),
`comparison.json` (rates with intervals, the paired gain, on the split `test`), `sets.json` (the
same of every evaluation set, by source and level, and what is known from training), `report.html`
(also the task's Deck), and with `evaluate.lm_eval.tasks` `lm_eval.json`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flytekit import Deck, StructuredDataset
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, EvaluateConfig
from tasks.context import LARGE, RunContext, echo
from tasks.decks import DECK
from tasks.evaluate_parts import answer_problems, joined, parts_of
from tasks.pages import model_facts
from tasks.preprocess import SPLITS, log_splits
from tasks.ray_cluster import LOCAL_OBJECT_STORE_BYTES
from tasks.stage import stage, stage_cache
from tasks.start_model import first_model, trained_by
from tasks.tables import EvaluationRows
from tasks.variants import on_profiles

if TYPE_CHECKING:
    import pandas as pd

    from engine.evaluation.lm_eval import HarnessScore


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

    parts: what a map task has decoded (`tasks.evaluate_parts`); None: both models are decoded here.
    """

    from engine.controller.ray_session import ray_session
    from engine.data.contract import EVALUATION_ROWS, check
    from engine.data.evaluation_sets import evaluation_files
    from engine.evaluation.layout import uses_ranks
    from engine.evaluation.lm_eval import pairs, require_lm_eval
    from engine.evaluation.overoptimisation import read_overoptimisation
    from engine.evaluation.report import render_report
    from engine.evaluation.sets import TEST, compare_sets, read_problems, rows_of_set, write_sets
    from engine.evaluation.settings import comparable_settings
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
    from engine.data.control_tokens import rows_spelling_control_tokens
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
    from engine.promotion.contamination import trained_on

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
