"""What the promote task is tested on: artifacts of the stages before it, and a registry."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, EvaluateConfig, LineageConfig, ModelConfig, PromoteConfig
from engine.data.sources import load_splits
from engine.data.tokenizer import train_tokenizer
from engine.evaluation.comparability import comparable_settings
from engine.evaluation.scoring import evaluate_model
from engine.evaluation.summary import Statistics, compare_sets, read_problems, write_sets
from engine.models import build_model, save_model
from engine.stages.settings import PromotionSettings, RunContext
from engine.storage.artifacts import Draft, publish, read_manifest, staging
from engine.tracking import Tracker
from tasks.stages import promote_stage

SHAPE = ModelConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
EVALUATE = EvaluateConfig(samples=1, k=1)
NAME = "hybridflyte-policy"


def rules(**changes: Any) -> PromoteConfig:
    """Rules for evaluations of few problems, whose right answers are our choice."""
    few: dict[str, Any] = {"minimum_problems": 5, "recheck": {"problems": 0}}
    return PromoteConfig.model_validate(few | changes)


RULES = rules()


Forge = Callable[[pd.DataFrame, pd.DataFrame], None]


@dataclass
class Bench:
    """Artifacts as the stages before `promote` make them, with evaluations of our choice."""

    data: DataConfig
    dataset: Path
    folder: Path = Path()  # the last promotion's artifact
    made: dict[Any, Any] = field(default_factory=dict)  # by what it was made from
    evaluate: EvaluateConfig = EVALUATE

    def copy(self) -> Bench:
        """One that begins with what this one has made."""
        return replace(self, made=dict(self.made))

    def _once(self, make: Callable[..., Any], *given: Any) -> Any:
        key = make.__name__, *given
        if key not in self.made:
            self.made[key] = make(*given)
        return self.made[key]

    def model(self, seed: int, mlflow_run: str = "") -> Path:
        """Publish a model of its own, made in an MLflow run or, as fetched ones, in none."""
        model: Path = self._once(self._model, seed, mlflow_run)
        return model

    def _model(self, seed: int, mlflow_run: str) -> Path:
        rows = pd.read_parquet(self.dataset / "test.parquet")
        texts = [message["content"] for prompt in rows["prompt"] for message in prompt]
        tokenizer = train_tokenizer(texts, 300)
        with staging("rl") as folder:
            save_model(build_model(SHAPE, tokenizer, seed), tokenizer, folder)
            draft = Draft(kind="rl", config={"seed": seed}, mlflow_run=mlflow_run)
            return publish(folder, draft)

    def evaluation(
        self,
        model: Path,
        correct: int,
        length: float = 4.0,
        recorded: bool = True,
        changed: dict[str, Any] | None = None,
        forged: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows,
    ) -> Path:
        """Publish an evaluation in which the first `correct` greedy answers are right.

        length: tokens of each response.
        recorded: whether it says which budget of tokens it was made with.
        changed: settings that it says it was made with, other than these.
        forged: what is done to the rows of both models before they are digested.
        """
        options = json.dumps([length, recorded, changed or {}])
        evidence: Path = self._once(
            self._evaluation, model, correct, options, forged, self.data.model_dump_json()
        )
        return evidence

    def _answers(self) -> pd.DataFrame:
        """Of some model, since it is our choice which are right."""
        problems = read_problems(self.dataset)
        return evaluate_model(
            self.model(seed=1), problems, "warm_start", EVALUATE, max_response_length=4, seed=0
        ).assign(greedy_correct=False, response_length=4.0)

    def _evaluation(
        self,
        model: Path,
        correct: int,
        options: str,
        forged: Callable[[pd.DataFrame], pd.DataFrame],
        data: str,
    ) -> Path:
        length, recorded, changed = json.loads(options)
        before = self._once(self._answers)
        after = before.assign(
            model="rl",
            greedy_correct=[i < correct for i in range(len(before))],
            response_length=length,
        )
        config = comparable_settings(DataConfig.model_validate_json(data), EVALUATE, 0)
        if not recorded:
            del config["data"]
        return self._publish(model, forged(before), forged(after), config | changed)

    def honest(self, model: Path, forged: Forge = lambda before, after: None) -> Path:
        """Publish an evaluation of what the models do answer, as `evaluate` says.

        forged: what is done to the rows, in place, before they are digested.
        """
        before, after = (self._once(self._answered, path) for path in (self.model(1), model))
        before, after = before.assign(model="warm_start"), after.copy()
        forged(before, after)
        return self._publish(model, before, after, comparable_settings(self.data, self.evaluate, 0))

    def _answered(self, model: Path) -> pd.DataFrame:
        problems = read_problems(self.dataset)
        return evaluate_model(model, problems, "rl", self.evaluate, max_response_length=4, seed=0)

    def _publish(
        self, model: Path, before: pd.DataFrame, after: pd.DataFrame, config: dict[str, Any]
    ) -> Path:
        known = dict.fromkeys(before["dataset"], 0)
        sets = compare_sets(before, after, known, Statistics(1, 0.95, 0))
        with staging("evaluation") as folder:
            before.to_parquet(folder / "rows_warm_start.parquet", index=False)
            after.to_parquet(folder / "rows_rl.parquet", index=False)
            (folder / "comparison.json").write_text(sets[0].comparison.to_json())
            write_sets(folder, sets)
            made_of = {"dataset": self.dataset, "warm_start": self.model(1), "policy": model}
            parents = tuple(
                read_manifest(artifact).as_parent(name, artifact)
                for name, artifact in made_of.items()
            )
            return publish(folder, Draft(kind="evaluation", parents=parents, config=config))

    def promote(
        self,
        model: Path,
        evaluation: Path,
        config: PromoteConfig = RULES,
        approved_by: str = "",
        lineage: LineageConfig = LineageConfig(),  # noqa: B008 (frozen)
    ) -> dict[str, Any]:
        """Run the task in a run of its own; return its decision."""
        return self.promote_in(new_run(), model, evaluation, config, approved_by, lineage)

    def promote_in(
        self,
        run: RunContext,
        model: Path,
        evaluation: Path,
        config: PromoteConfig = RULES,
        approved_by: str = "",
        lineage: LineageConfig = LineageConfig(),  # noqa: B008 (frozen)
    ) -> dict[str, Any]:
        folder = promote_stage(
            run=run,
            settings=PromotionSettings(
                data=self.data, evaluate=self.evaluate, config=config, lineage=lineage, seed=0
            ),
            dataset=FlyteDirectory(str(self.dataset)),
            policy=FlyteDirectory(str(model)),
            evaluation=FlyteDirectory(str(evaluation)),
            approved_by=approved_by,
        )
        self.folder = Path(folder.path)
        decision: dict[str, Any] = json.loads((Path(folder.path) / "decision.json").read_text())
        return decision


def new_run() -> RunContext:
    return RunContext(
        run_id=uuid.uuid4().hex, mlflow_run=Tracker().start_pipeline("p"),
        experiment="hybridflyte", started_at=time.time(),
    )  # fmt: skip


def champion() -> str | None:
    found = Tracker().champion(NAME, "champion")
    return found.tags["artifact_digest"] if found else None


def digest(artifact: Path) -> str:
    return read_manifest(artifact).digest


def make_bench(
    seed: int,
    test_size: int = 40,
    hard: int = 0,
    forged: Callable[[pd.DataFrame], pd.DataFrame] | None = None,
) -> Bench:
    """Publish a dataset, whose last problems may be those of the evaluation set `hard`.

    forged: what is done to the problems before they are digested.
    """
    data = DataConfig(
        sft_size=8, train_size=8, validation_size=4, test_size=test_size, max_response_length=4
    )
    tables = load_splits(data, seed).tables()
    test = tables["test"] if forged is None else forged(tables["test"])
    tables["test"] = test.head(len(test) - hard)
    if hard:
        tables["test_hard"] = test.tail(hard)
    with staging("dataset") as folder:
        for name, table in tables.items():
            table.to_parquet(folder / f"{name}.parquet", index=False)
        return Bench(data, publish(folder, Draft(kind="dataset", config={"seed": seed})))


def spoil(evidence: Path) -> None:
    rows = pd.read_parquet(evidence / "rows_rl.parquet").assign(greedy_correct=True)
    rows.to_parquet(evidence / "rows_rl.parquet", index=False)
