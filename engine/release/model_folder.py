"""A model's folder for others, with its card, and its repository on the hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from engine.console import points
from engine.errors import ConfigError, LineageError, StorageError, first_line
from engine.evaluation.metrics import Interval
from engine.evaluation.summary import EvaluationComparison, ModelSummary
from engine.lineage.graph import ArtifactNode
from engine.redaction import presentable
from engine.release.model import Base, Licence, ReleasedModel
from engine.storage.artifacts import SOURCE
from engine.storage.digests import FileEntry, hash_files
from engine.storage.filesystem import fsync_tree, is_hub_id, writing

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, EvalResult


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(line, cells)) + " |" for cells in lines)


def line(text: str) -> str:
    """Return a text that neither ends a line, nor a cell, nor begins HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def results(model: ReleasedModel, source: str) -> list[EvalResult]:
    """Return one result a metric, with the ends of its interval or its standard error."""
    from huggingface_hub import EvalResult

    comparison, evaluation = model.comparison, model.evaluation
    if comparison is None or evaluation is None:
        return []
    dataset = {parent.name: parent.digest for parent in evaluation.parents}.get("dataset", "")
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=source,
            dataset_name=f"{source}, held-out problems",
            dataset_split="test",
            dataset_args={"problems": comparison.problems, "digest": dataset},
            metric_type=kind,
            metric_name=name,
            metric_value=round(rate.mean, 6),
            metric_args={
                "confidence": comparison.confidence,
                "low": round(rate.low, 6),
                "high": round(rate.high, 6),
            },
        )
        for kind, name, rate in _rates(comparison, comparison.after)
    ] + [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.task,
            dataset_name=f"{score.task} (lm-evaluation-harness)",
            dataset_args={"version": score.version, "documents": score.documents},
            metric_type=score.metric,
            metric_name=score.metric,
            metric_value=round(score.value, 6),
            metric_args={"stderr": score.stderr} if score.stderr is not None else None,
        )
        for score in model.harness
    ]


def _rates(comparison: EvaluationComparison, side: ModelSummary) -> list[tuple[str, str, Interval]]:
    n = comparison.samples
    return [
        ("pass@1", "pass@1 (greedy)", side.pass_at_1),
        (f"pass@{comparison.k}", f"pass@{comparison.k} (of {n} samples)", side.pass_at_k),
        ("majority", f"majority vote of {n}", side.majority),
        ("format", "answers in the format", side.format_rate),
    ]


def score_sections(model: ReleasedModel) -> list[str]:
    """Return the card's sections of scores: two models with intervals, gain, and the harness."""
    comparison, evaluation = model.comparison, model.evaluation
    if comparison is None or evaluation is None:
        return ["## Scores\n\nThis model was not evaluated."]
    kinds = {parent.name: parent.kind for parent in evaluation.parents}
    start = "start_model" if kinds.get("warm_start") == "start_model" else comparison.before.model
    sides, gain = (comparison.before, comparison.after), comparison.gain
    rates = [_rates(comparison, side) for side in sides]
    rows = [
        (name, *(f"{rate.mean:.1%} [{rate.low:.1%}, {rate.high:.1%}]" for rate in (before, after)))
        for (_, name, before), (_, _, after) in zip(*rates, strict=True)
    ]
    rows.append(("mean response, tokens", *(f"{s.response_length.mean:.1f}" for s in sides)))
    sections = [
        f"## Scores\n\n{comparison.problems} held-out problems, the same for both models, with "
        f"{comparison.confidence:.0%} intervals; evaluation `{evaluation.digest}`, "
        f"seed {comparison.seed}.",
        table(("", start.replace("_", " "), "this model"), rows),
        f"Paired gain in greedy pass@1: {points(gain)}"
        f"; {comparison.fixed} problems became right and {comparison.broken} wrong.",
    ]
    scores = []
    for score in model.harness:
        ends = score.interval(comparison.confidence)
        shown = f"{score.value:.4g}" + (f" [{ends.low:.4g}, {ends.high:.4g}]" if ends else "")
        scores.append((score.task, score.version, score.metric, shown))
    if scores:
        sections += [
            "lm-evaluation-harness, with intervals:",
            table(("task", "version", "metric", "this model"), scores),
        ]
    return sections


# The nearest stage of each kind.
SETTINGS_OF: tuple[str, ...] = ("dataset", "model", "start_model", "sft", "pairs")
SETTINGS_OF += ("reward_model", "preference", "rl")
_LOCATION = re.compile(r"(?:[a-z][a-z0-9+.-]*://|/|~)\S*")  # an address or a folder

USE = """```python
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = PreTrainedTokenizerFast.from_pretrained("{name}")
```"""


def model_card(
    model: ReleasedModel, base: Base | None, licence: Licence | None, repository: str
) -> str:
    """Return the whole README.md. `repository` is what a reader loads the model by."""
    nearest: dict[str, ArtifactNode] = {}
    lineage, data = [], []
    for node in model.line:
        what = (_name(node), f"`{node.digest}`")
        if node.kind in ("dataset", "pairs", SOURCE):
            counts = {key: value for key, value in node.draft.metrics.items() if key != "seconds"}
            data.append((*what, ", ".join(f"{key} {value:,.6g}" for key, value in counts.items())))
        if node.kind in SETTINGS_OF and node.draft.config:
            nearest.setdefault(node.kind, node)
        manifest = node.manifest
        facts = (f"`{manifest.own_digest}`", f"`{manifest.code_version}`") if manifest else ("", "")
        lineage.append((*what, *facts))
    settings = "\n\n".join(map(_settings, nearest.values()))
    sections = [
        f"# {line(model.name)}",
        _facts(model, base, licence),
        *score_sections(model),
        "## Data\n\n"
        + (table(("", "content digest", ""), data) if data else "No data are recorded."),
        "## Settings\n\n" + (settings or "None are recorded."),
        "## Lineage\n\nAll that it was made from, nearest first; `lineage.json` has it for "
        "programs.\n\n" + table(("", "content digest", "manifest digest", "code"), lineage),
        "## Use\n\n" + USE.format(name=repository),
    ]
    body = presentable("\n\n".join(sections))
    return f"---\n{_front_matter(model, base, licence)}\n---\n\n{body}\n"


def _settings(node: ArtifactNode) -> str:
    """Return what a stage was made by, as YAML that is folded away."""
    text = yaml.safe_dump(public_values(node.draft.config), sort_keys=False, allow_unicode=True)
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text) or ["``"]))
    title = f"{node.kind} <code>{node.digest[:12]}</code>"
    return f"<details><summary>{title}</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>"


def _front_matter(model: ReleasedModel, base: Base | None, licence: Licence | None) -> str:
    from huggingface_hub import ModelCardData

    kinds = [node.kind for node in model.line]
    made = [node for node in model.line if node.kind == "dataset"]
    settings = [data for node in made if isinstance(data := node.draft.config.get("data"), dict)]
    hub_ids = dict.fromkeys(map(_hub_dataset, made))  # of the hub's datasets among the data
    datasets = [hub_id for hub_id in hub_ids if hub_id]
    source = settings[0].get("source") if settings else None
    scores = results(model, datasets[0] if datasets else str(source or "unknown"))
    known = licence or Licence("")
    data = ModelCardData(
        base_model=(base.hub_id or None) if base else None, datasets=datasets or None,
        library_name="transformers", pipeline_tag="text-generation", license=known.id or None,
        license_name=known.name or None, license_link=known.link or None,
        model_name=model.name if scores else None, eval_results=scores or None,
        tags=["hybridflyte", *(kind for kind in ("sft", "preference", "rl") if kind in kinds)],
    )  # fmt: skip
    return str(data.to_yaml())


def _facts(model: ReleasedModel, base: Base | None, licence: Licence | None) -> str:
    manifest, rows = model.manifest, []
    if licence is None:
        from_scratch = base is not None and not base.path
        terms = "the owner's to choose" if from_scratch else "unknown: no card of the base says it"
    else:
        source = licence.source and f"({licence.source})"
        terms = " ".join(filter(None, (licence.id, licence.name, licence.link, source)))
    if model.version is not None:
        facts = model.version.facts
        if facts.get("aliases"):
            rows.append(("alias", facts["aliases"]))
        if facts.get("promoted_at"):
            why = (facts["promoted_at"], facts.get("promotion_reason"))
            rows.append(("promoted", ": ".join(filter(None, why))))
    rows += [
        ("content digest (SHA-256)", f"`{manifest.digest}`"),
        ("manifest digest", f"`{manifest.own_digest}`"),
        ("trained from", base.sentence() if base else "not recorded"),
        ("licence", terms),
        ("made by", f"stage `{manifest.kind}`, code `{manifest.code_version}`"),
        ("made at", f"{manifest.created_at:%Y-%m-%d %H:%M} UTC"),
    ]
    return table(("", ""), rows)


def public_values(value: object) -> object:
    """Return JSON values in which a folder or address is its last part alone, e.g. `…/base`."""
    if isinstance(value, dict):
        return {key: public_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public_values(item) for item in value]
    if not isinstance(value, str) or value.startswith("hf://"):
        return value
    return "…/" + value.rstrip("/").rsplit("/", 1)[-1] if _LOCATION.fullmatch(value) else value


def _hub_dataset(node: ArtifactNode) -> str:
    """Return the id of the hub's dataset that a dataset was read from; empty for others."""
    data = node.draft.config.get("data")
    uri = next((parent.uri for parent in node.draft.parents if parent.kind == SOURCE), "")
    if match := re.match(r"hf://([\w.-]+(?:/[\w.-]+)?)", uri):
        return match[1]
    is_gsm8k = isinstance(data, dict) and data.get("source") == "gsm8k"
    return uri if is_gsm8k and is_hub_id(uri) else ""


def _name(node: ArtifactNode) -> str:
    """Return the kind, and of a source the last part of where it came from."""
    return f"{node.kind} {public_values(node.label)}" if node.kind == SOURCE else node.kind


CARD, LINEAGE = "README.md", "lineage.json"
# A stage's files beside a model that loading it doesn't need; rollouts contain pieces of its data.
LEFT_OUT, ROLLOUTS = (".parquet", "timeline.json"), "rollouts/"


def released_files(model: ReleasedModel) -> dict[str, FileEntry]:
    """Return the files of the artifact that leave with the model, by name."""
    return {
        name: entry
        for name, entry in model.manifest.files.items()
        if not name.endswith(LEFT_OUT)
        and not name.startswith(ROLLOUTS)
        and name not in (CARD, LINEAGE)
    }


def lineage_json(model: ReleasedModel) -> str:
    """Return the model and all that it was made from, with digests; no folder of this machine."""
    nodes: list[dict[str, object]] = []
    for node in model.line:
        record: dict[str, object] = {"manifest_digest": "", "manifest": None}
        if (manifest := node.manifest) is not None:
            public = public_values(manifest.model_dump(mode="json", exclude={"files", "parents"}))
            record = {"manifest_digest": manifest.own_digest, "manifest": public}
        nodes.append({"key": node.key, "kind": node.kind, "digest": node.digest, **record})
    keys = {node["key"] for node in nodes}
    values = {
        "model": {"name": model.name, "key": model.key, "digest": model.manifest.digest},
        "evaluation": model.evaluation.digest if model.evaluation else None,
        "nodes": nodes,
        "edges": [
            {"parent": edge.parent, "child": edge.child, "name": edge.name}
            for edge in model.graph.edges.values()
            if {edge.child, edge.parent} <= keys
        ],
        "files": {name: entry.sha256 for name, entry in released_files(model).items()},
    }
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def write_folder(model: ReleasedModel, card: str, target: str | Path) -> Path:
    """Write the model to a new folder, whole or not at all; return it.

    Raises StorageError where it is there or can't be written, LineageError for a changed file.
    """
    target = Path(target).expanduser().absolute()
    if target.exists():
        raise StorageError(f"{target} is there already; delete it, or name another folder")
    files = released_files(model)
    with writing(target, "free space, or name another folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as draft:
            folder = Path(draft) / "model"  # with the usual permissions, unlike the draft
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(model.folder / name, folder / name)
            copied = hash_files(folder)
            if copied != files:
                changed = sorted(name for name in files if copied.get(name) != files[name])
                raise LineageError(f"{model.folder}: {changed[0]} changed while it was copied")
            (folder / LINEAGE).write_text(lineage_json(model), encoding="utf-8")
            (folder / CARD).write_text(card, encoding="utf-8")
            fsync_tree(folder)
            os.rename(folder, target)
    return target


PREFIX = "hf://"
SECONDS = 60.0  # without a byte, before a request is given up; the hub's own client waits for ever
_ADDRESS = re.compile(r"hf://(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<branch>[\w./-]+))?")
# An earlier model's weights, e.g. in more shards, must not stay beside new ones.
_WEIGHTS = re.compile(r"(adapter/.*|.*\.(safetensors|bin)(\.index\.json)?)")


@dataclass(frozen=True, slots=True)
class Repository:
    """A model's repository on the hub."""

    id: str  # e.g. "acme/math-1.5b"
    branch: str | None = None  # None: the main one

    @staticmethod
    def parse(address: str) -> Repository:
        """Read `hf://OWNER/NAME` or `hf://OWNER/NAME@BRANCH`; ConfigError for anything else."""
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise ConfigError(f"--to {address!r} is no repository; write hf://OWNER/NAME[@BRANCH]")
        return Repository(match["id"], match["branch"])


def push(
    model: ReleasedModel, texts: Mapping[str, str], repository: Repository, private: bool
) -> str:
    """Upload a model's files and `texts` (by name) as one commit; return its address.

    The repository and branch are made where they are missing. Weights there that this model lacks
    are removed. Raises StorageError for what the hub refuses, a commit of others in between too.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError, HTTPError
    from huggingface_hub.utils._http import default_client_factory

    def client() -> Any:
        session = default_client_factory()
        session.timeout = SECONDS
        return session

    hub.set_client_factory(client)
    api, name, branch = hub.HfApi(), repository.id, repository.branch
    files = released_files(model)
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        if branch is not None:
            api.create_branch(name, branch=branch, exist_ok=True)
        head = api.model_info(name, revision=branch, timeout=SECONDS)
        there = [entry.rfilename for entry in head.siblings or ()]
        old = [file for file in there if file not in files and _WEIGHTS.fullmatch(file)]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *map(hub.CommitOperationDelete, old),
            *(hub.CommitOperationAdd(file, str(model.folder / file)) for file in files),
            *(hub.CommitOperationAdd(file, text.encode()) for file, text in texts.items()),
        ]
        title = f"{model.name}, content {model.manifest.digest[:16]}"
        commit = api.create_commit(
            name, operations, commit_message=title, revision=branch, parent_commit=head.sha
        )
    except (OSError, ValueError, RuntimeError, HTTPError, HFValidationError) as error:
        # huggingface_hub 2.4 wraps the error of an upload in a RuntimeError.
        source = (error.__cause__ if isinstance(error, RuntimeError) else None) or error
        raise StorageError(
            f"{PREFIX}{name} could not be written: {first_line(source)}; nothing was committed; "
            "check the name, the network and the token (hf auth login, or HF_TOKEN with write "
            "access)"
        ) from error
    return str(commit.commit_url)
