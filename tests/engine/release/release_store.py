"""Published artifacts of a run whose model can be exported; its weights are bytes, not numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.evaluation.metrics import Interval, LengthSummary
from engine.evaluation.summary import EvaluatedSet, EvaluationComparison, ModelSummary
from engine.storage.artifacts import Draft, Parent, publish, read_manifest, staging
from engine.storage.digests import hash_file
from engine.tracking import Tracker

NAME = "policy"


@dataclass(frozen=True)
class Made:
    """The artifacts of a run."""

    dataset: Path
    sft: Path
    rl: Path
    evaluation: Path


def make(kind: str, files: dict[str, str], *parents: Parent, **values: Any) -> Path:
    """Publish a folder with these files."""
    with staging(kind) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return publish(folder, Draft(kind=kind, parents=parents, **values))


def parent(name: str, path: Path) -> Parent:
    return read_manifest(path).as_parent(name, path)


def make_run(
    folder: Path, start: str = "", start_digest: str = "", first: str = "sft",
    source: str = "files", uri: str = "",
) -> Made:  # fmt: skip
    """source → dataset → `first` (sft or start_model, of the model `start`) → rl → evaluation."""
    raw = folder / "raw.jsonl"
    raw.write_text('{"question": "1+1"}\n')
    read = Parent(name="source", kind="source", digest=hash_file(raw), uri=uri or str(raw))
    data = {"source": source, "path": "" if uri else str(folder), "note": "a ``` in a setting"}
    dataset = make(
        "dataset", {"train.parquet": "rows"}, read,
        config={"data": data, "seed": 0}, metrics={"rows_train": 4096.0, "seconds": 1.5},
    )  # fmt: skip
    weights = {"config.json": "{}", "model.safetensors": "warm", "tokenizer.json": "{}"}
    sft = make(
        first, weights, parent("dataset", dataset),
        config={"model": {"path": start}, "start_digest": start_digest, "sft": {"lr": 0.001}},
    )  # fmt: skip
    rl = make(
        "rl",
        {
            **weights, "model.safetensors": "better", "adapter/adapter_config.json": "{}",
            "metrics.parquet": "steps", "rollouts/rollouts.html": "prompts and answers",
        },
        parent("dataset", dataset), parent("warm_start", sft),
        config={"rl": {"actor": {"lr": 0.0005}}, "seed": 0}, metrics={"reward": 0.9},
    )  # fmt: skip
    return Made(dataset, sft, rl, evaluate(dataset, sft, rl, 0.973))


def evaluate(dataset: Path, before: Path, after: Path, score: float) -> Path:
    """Publish an evaluation of `after` with this pass@1."""
    above = [("dataset", dataset), ("warm_start", before), ("policy", after)]
    return make(
        "evaluation",
        {"sets.json": json.dumps([asdict(EvaluatedSet("test", comparison(score), [], known=0))])},
        *(parent(name, path) for name, path in above),
        config={"seed": 0, "score": score},
    )


def comparison(score: float) -> EvaluationComparison:
    def side(model: str, rate: float) -> ModelSummary:
        value, length = Interval(rate, rate - 0.02, rate + 0.02), LengthSummary(30.5, 30, 40, 50)
        return ModelSummary(model, *[value] * 6, length, length, greedy_score=rate, errors=0)

    gain = Interval(score - 0.451, 0.477, 0.568)
    return EvaluationComparison(
        side("warm_start", 0.451), side("rl", score), gain, gain, gain, gain,
        fixed=300, broken=33, problems=512, prompt_digest="0" * 64, k=4, samples=4,
        confidence=0.95, seed=0,
    )  # fmt: skip


def register(made: Made, alias: str = "champion", **tags: str) -> Tracker:
    """Register the model as `promote` does, and point the alias to it."""
    tracker = Tracker()
    named = {
        "evaluation_uri": str(made.evaluation),
        "evaluation_manifest": read_manifest(made.evaluation).own_digest,
    }
    with tracker.stage("rl") as stage:
        version = tracker.register_model(made.rl, NAME, stage.run_id, named | tags)
    current = tracker.champion(NAME, alias)
    tracker.set_alias(NAME, alias, version, current.version if current else None)
    return tracker


def edit(folder: Path, name: str, **values: object) -> None:
    """Change entries of a JSON file, as someone with an editor would."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
