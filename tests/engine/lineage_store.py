"""Real artifacts for the tests of lineage: published folders whose manifests name each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.storage.artifacts import Draft, Manifest, Parent, publish, read_manifest, staging
from engine.storage.digests import FileEntry, content_digest, hash_file
from engine.storage.filesystem import artifact_path

NASTY = "</script><img src=x onerror=alert(1)>&\"'"


def make(
    kind: str, text: str, *parents: Parent, config: dict[str, Any] | None = None, **metrics: float
) -> Path:
    """Publish a folder with one file."""
    with staging(kind) as folder:
        (folder / "content.txt").write_text(text)
        given = {"text": text} if config is None else config
        return publish(folder, Draft(kind=kind, parents=parents, config=given, metrics=metrics))


def parent(name: str, path: Path | str) -> Parent:
    """The reference to a published folder."""
    return read_manifest(path).as_parent(name, path)


@dataclass(frozen=True)
class Run:
    """source → dataset → sft → rl (also from the dataset) → evaluation (of both)."""

    raw: Path
    dataset: Path
    sft: Path
    rl: Path
    evaluation: Path


def make_run(folder: Path, text: str = "better") -> Run:
    """Publish one run's artifacts; runs of other texts differ from the RL model on."""
    raw = folder / "raw.jsonl"
    raw.write_text('{"question": "1+1"}\n')
    source = Parent(name="gsm8k", kind="source", digest=hash_file(raw), uri=str(raw))
    data = make("dataset", "rows", source, rows=7)
    sft = make("sft", "weights", parent("dataset", data), validation_loss=0.5)
    rl = make(
        "rl", text, parent("warm_start", sft), parent("dataset", data),
        config={"rl": {"lr": 0.001, "text": text}}, reward=0.875,
    )  # fmt: skip
    evaluation = make(
        "evaluation", f"of {text}", parent("dataset", data), parent("policy", rl), gain=0.25
    )
    return Run(raw, data, sft, rl, evaluation)


def make_nights(folder: Path, nights: int) -> Path:
    """Publish nightly runs, each from the champion of the one before; return the last model.

    Four artifacts per retraining: 1 + 4 · nights nodes, with the source.
    """
    raw = folder / "raw.jsonl"
    raw.write_text("{}\n")
    source = Parent(name="log", kind="source", digest=hash_file(raw), uri=str(raw))
    template = read_manifest(make("sft", "template"))
    model = None
    for night in range(nights):
        data = quick(template, "dataset", f"rows {night}", source)
        start = [parent("champion", model)] if model else []
        sft = quick(template, "sft", f"sft {night}", parent("dataset", data), *start)
        above = (parent("warm_start", sft), parent("dataset", data))
        model = quick(template, "rl", f"rl {night}", *above)
        above = (parent("dataset", data), parent("policy", model))
        quick(template, "evaluation", f"of {night}", *above)
    assert model is not None
    return model


def quick(template: Manifest, kind: str, text: str, *parents: Parent) -> Path:
    """Write what `make` publishes, without its waits for the disk and its look at the sources."""
    files = {"content.txt": FileEntry(size=len(text), sha256=sha256(text.encode()).hexdigest())}
    digest = content_digest(files)
    folder = artifact_path(kind, digest)
    folder.mkdir(parents=True)
    (folder / "content.txt").write_text(text)
    changes = {"kind": kind, "digest": digest, "files": files, "parents": parents}
    manifest = template.model_copy(update=changes)
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return folder


def edit(folder: Path, **values: object) -> None:
    """Change top-level entries of a manifest.json, as someone with an editor would."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2) + "\n")
