"""Task `promote`: registers the model and moves the champion's alias, if the evidence allows.

Artifact `promotion`: `decision.json` (promoted or not, why, against which champion). The rule is
`engine.evaluation.gate`. Anything missing or unreadable promotes nothing. Not cached, since the
champion of another day is another input; doing it again for the same model changes nothing.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, EvaluateConfig, PromoteConfig
from tasks.context import IMAGE, LARGE, RunContext, say, stage

if TYPE_CHECKING:
    import pandas as pd

    from engine.evaluation.metrics import Interval
    from engine.tracking import Tracker
    from engine.tracking.registry import ModelVersion


# On machines that stay: it may be moving an alias. Doing it again changes nothing.
@task(cache=False, requests=LARGE, container_image=IMAGE, retries=2, timeout=timedelta(hours=6))
def promote(
    run: RunContext,
    dataset: FlyteDirectory,
    policy: FlyteDirectory,
    evaluation: FlyteDirectory,
    data: DataConfig,
    evaluate: EvaluateConfig,
    config: PromoteConfig,
    seed: int,
) -> FlyteDirectory:
    """Register the RL model; make it champion if it beats the present one on the same problems."""
    from engine.evaluation.gate import decide
    from engine.lineage.manifest import read_manifest, verify
    from engine.tracking import Tracker

    settings = {"promote": config.model_dump(mode="json"), "seed": seed}
    with stage("promotion", run, settings) as this:
        test = this.parent("dataset", dataset) / "test.parquet"
        model = this.parent("policy", policy)
        evidence = this.parent("evaluation", evaluation)
        verify(evidence)
        tracker = Tracker(experiment=run.experiment)
        digest = read_manifest(model).digest
        champion = tracker.champion(config.model_name, config.alias)
        tags = {
            "artifact_uri": str(model),
            "artifact_digest": digest,
            "evaluation_uri": str(evidence),
            "hybridflyte.run": run.run_id,
        }
        version = tracker.register_model(
            model, config.model_name, read_manifest(model).mlflow_run or this.tracked.run_id, tags
        )
        name = f"{config.model_name} version {version}"
        if champion is not None and champion.tags.get("artifact_digest") == digest:
            promoted, reason = False, f"{name} is the {config.alias} already"
            gain = None
        else:
            gain = gain_over(
                tracker, champion, evidence, test, data, evaluate, seed, this.folder.parent
            )
            decision = decide(gain, config.minimum_gain, champion is not None)
            promoted, reason = decision.promote, decision.reason
            if promoted:
                expected = champion.version if champion else None
                tracker.set_alias(config.model_name, config.alias, version, expected)
        say(
            f"promotion: {name} {'is now' if promoted else 'was not made'} {config.alias}: {reason}"
            if gain is not None
            else f"promotion: {reason}"
        )
        record = {
            "promoted": promoted,
            "reason": reason,
            "model_name": config.model_name,
            "model_version": version,
            "alias": config.alias,
            "previous_champion": champion.version if champion else None,
            "gain": None if gain is None else [gain.mean, gain.low, gain.high],
            "evaluation_digest": read_manifest(evidence).digest,
        }
        (this.folder / "decision.json").write_text(json.dumps(record, indent=2))
        this.tracked.set_tags({k: str(v) for k, v in record.items()})
        return this.publish({"promoted": float(promoted)})


def gain_over(
    tracker: Tracker,
    champion: ModelVersion | None,
    evidence: Path,
    test_file: Path,
    data: DataConfig,
    evaluate: EvaluateConfig,
    seed: int,
    workspace: Path,
) -> Interval | None:
    """The paired gain of the new model: over the champion, or over the warm start without one."""
    from engine.evaluation.gate import read_interval
    from engine.evaluation.metrics import paired_bootstrap
    from engine.evaluation.rows import check_paired
    from tasks.evaluate import read_comparison

    if champion is None:
        return read_interval(read_comparison(evidence).get("gain"))
    import pandas as pd

    new = pd.read_parquet(evidence / "rows_rl.parquet")
    old = champion_rows(tracker, champion, new, test_file, data, evaluate, seed, workspace)
    check_paired(old, new)
    return paired_bootstrap(
        old["greedy_correct"].astype(float),
        new["greedy_correct"].astype(float),
        evaluate.confidence,
        evaluate.bootstrap_samples,
        seed,
    )


def champion_rows(
    tracker: Tracker,
    champion: ModelVersion,
    new: pd.DataFrame,
    test_file: Path,
    data: DataConfig,
    evaluate: EvaluateConfig,
    seed: int,
    workspace: Path,
) -> pd.DataFrame:
    """The champion's evaluation on the new model's problems: as recorded, or made now.

    A recorded evaluation counts only when its artifact is whole and holds the same problems.
    """
    import tempfile

    import pandas as pd

    from engine.errors import EngineError
    from engine.evaluation.rows import prompt_digest
    from engine.evaluator import evaluate_model
    from engine.lineage.manifest import verify

    recorded: Any = champion.tags.get("evaluation_uri", "")
    try:
        verify(recorded)
        rows = pd.read_parquet(Path(recorded) / "rows_rl.parquet")
        if prompt_digest(rows) == prompt_digest(new):
            return rows
    except (EngineError, OSError) as error:
        say(f"promotion: the champion's recorded evaluation is of no use ({error})")
    say(f"promotion: evaluating the champion (version {champion.version}) on these problems")
    with tempfile.TemporaryDirectory(dir=workspace) as scratch:
        folder = tracker.download_model(champion.name, champion.version, Path(scratch) / "champion")
        return evaluate_model(
            folder,
            pd.read_parquet(test_file),
            "champion",
            evaluate,
            max_response_length=data.max_response_length,
            seed=seed,
        )
