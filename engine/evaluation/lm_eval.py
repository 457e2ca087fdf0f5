"""Run the lm-evaluation-harness (EleutherAI) on a model's folder in a process of its own.

The harness is optional (`pip install hybridflyte[lm-eval]`, or in another environment that
`evaluate.lm_eval.python` names). Its own figures are taken over with their standard errors.
"""

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from engine.config import LMEvalConfig
from engine.errors import ConfigError, DataError, LineageError
from engine.evaluation.metrics import Interval, wilson_interval

FILE = "lm_eval.json"  # in the artifact of an evaluation
LOG_END = 1500  # characters of its log that a message repeats
STARTS_S = 120.0  # for another Python to say whether it has lm_eval
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class HarnessScore:
    """One metric of one task."""

    task: str  # e.g. "arc_easy"
    metric: str  # e.g. "acc", or "exact_match (strict-match)" for a filter other than "none"
    value: float
    stderr: float | None  # None where the harness gives none
    version: str  # of the task, e.g. "1.0"
    documents: int | None  # that it was computed on

    @property
    def key(self) -> str:
        return f"lm_eval/{self.task}/{self.metric}"

    def interval(self, confidence: float) -> Interval | None:
        """Wilson's interval of a share of documents, else value ± z·stderr; None without stderr."""
        if self.stderr is None:
            return None
        right = self.value * (self.documents or 0)  # whole for a share of documents, such as acc
        if self.documents and 0 <= right <= self.documents and math.isclose(right, round(right)):
            return wilson_interval(round(right), self.documents, confidence)
        half = NormalDist().inv_cdf(0.5 + confidence / 2) * self.stderr
        return Interval(self.value, self.value - half, self.value + half)


def require_lm_eval(config: LMEvalConfig) -> None:
    """Raise ConfigError unless the harness, and a folder of one's own tasks, are there."""
    if not config.tasks:
        return
    if config.include_path and not Path(config.include_path).is_dir():
        raise ConfigError(
            f"evaluate.lm_eval.include_path={config.include_path!r} is no folder; name one with "
            "task files (YAML), or leave it empty"
        )
    is_installed = not config.python and importlib.util.find_spec("lm_eval") is not None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if config.python:
            command = [config.python, "-c", "import lm_eval"]
            subprocess.run(command, capture_output=True, timeout=STARTS_S, check=True)
            is_installed = True
    if not is_installed:
        raise ConfigError(
            f"evaluate.lm_eval.tasks={list(config.tasks)} needs the lm-evaluation-harness, which "
            f"{config.python or 'this environment'} does not have; pip install lm-eval, set "
            "evaluate.lm_eval.python to one that has it, or leave the tasks out"
        )


def run_lm_eval(
    folder: str | Path, config: LMEvalConfig, seed: int, scratch: Path
) -> list[HarnessScore]:
    """Run the configured tasks on a model's folder; return their scores, by task and metric.

    It runs on this process's device, in bfloat16 on a GPU and in float32 without one, in an empty
    folder `scratch`. Raises DataError, with the end of its log, where it fails or takes too long.
    """
    command, log = _command(Path(folder), config, seed, scratch), scratch / "log"
    offline = OFFLINE if config.offline else {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"} | offline,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(config.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # on Ctrl-C as well
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        slow = f"took longer than evaluate.lm_eval.timeout_s={config.timeout_s:g}"
        what = slow if status is None else f"ended with status {status}"
        end = " ".join(log.read_text(errors="replace")[-LOG_END:].split())
        raise DataError(
            f"the lm-evaluation-harness {what} on {folder}: {end}; check evaluate.lm_eval (offline "
            "takes data from this machine alone)"
        )
    written = sorted(scratch.rglob("results_*.json"))
    if not written:
        raise DataError(f"the lm-evaluation-harness wrote no results on {folder}; see its version")
    return read_results(json.loads(written[-1].read_text()))


def read_results(values: Mapping[str, Any]) -> list[HarnessScore]:
    """The scores in the harness's own JSON, whose metrics are named `acc,none`."""
    scores = []
    for task, metrics in sorted(values["results"].items()):
        count = values.get("n-samples", {}).get(task, {}).get("effective")
        version = str(values.get("versions", {}).get(task, ""))
        for name, value in sorted(metrics.items()):
            metric, comma, kind = name.partition(",")
            number = isinstance(value, int | float) and math.isfinite(value)
            if not comma or metric.endswith("_stderr") or not number:
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            stderr = error if isinstance(error, float) and math.isfinite(error) else None
            shown = metric if kind == "none" else f"{metric} ({kind})"
            scores.append(HarnessScore(task, shown, float(value), stderr, version, count))
    return scores


def to_json(scores: Mapping[str, Sequence[HarnessScore]], confidence: float) -> str:
    """The scores of models by name, as the artifact has them."""
    models = {name: [asdict(score) for score in rows] for name, rows in scores.items()}
    return json.dumps({"confidence": confidence, "models": models}, indent=2, sort_keys=True)


def from_json(text: str | bytes, where: str) -> dict[str, list[HarnessScore]]:
    """Read what `to_json` wrote; LineageError, which names `where`, if it is something else."""
    try:
        models = json.loads(text)["models"]
        return {name: [HarnessScore(**row) for row in rows] for name, rows in models.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LineageError(f"{where} can't be read ({error}); evaluate the models again") from error


def pairs(
    scores: Mapping[str, Sequence[HarnessScore]], before: str, after: str
) -> list[tuple[HarnessScore, HarnessScore]]:
    """The same metric of two models, for each that both have."""
    first = {score.key: score for score in scores.get(before, ())}
    return [(first[score.key], score) for score in scores.get(after, ()) if score.key in first]


def _command(folder: Path, config: LMEvalConfig, seed: int, scratch: Path) -> list[str]:
    import torch

    from engine.data.tokenizer import tokenizer_alone

    gpu = torch.cuda.is_available()
    arguments = {"pretrained": str(folder), "dtype": "bfloat16" if gpu else "float32"}
    if alone := tokenizer_alone(folder, scratch / "tokenizer"):
        arguments["tokenizer"] = str(alone)
    if wrong := [value for value in arguments.values() if "," in value or "=" in value]:
        raise ConfigError(f"the lm-evaluation-harness takes no path with , or =: {wrong[0]}")
    command = [
        *(config.python or sys.executable, "-m", "lm_eval", "--model", "hf"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", ",".join(config.tasks), "--batch_size", str(config.batch_size)),
        *("--device", "cuda:0" if gpu else "cpu", "--seed", str(seed)),
        *("--output_path", str(scratch / "results")),
    ]
    if config.include_path:
        command += ["--include_path", config.include_path]
    if config.num_fewshot is not None:
        command += ["--num_fewshot", str(config.num_fewshot)]
    if config.limit:
        command += ["--limit", str(config.limit)]
    return command + ["--apply_chat_template"] * config.apply_chat_template
