"""A model's folder for others: its files, its card, and its lineage for programs.

It appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from engine.errors import LineageError, StorageError
from engine.release.card import public_values
from engine.release.model import ReleasedModel
from engine.storage.atomic import fsync_tree
from engine.storage.hashing import FileEntry, hash_files

CARD, LINEAGE = "README.md", "lineage.json"
# What a stage leaves beside a model and nobody loads it by; the rollouts are pieces of its data.
LEFT_OUT, ROLLOUTS = (".parquet", "timeline.json"), "rollouts/"


def released_files(model: ReleasedModel) -> dict[str, FileEntry]:
    """The files of the artifact that leave with the model, by name."""
    return {
        name: entry
        for name, entry in model.manifest.files.items()
        if not name.endswith(LEFT_OUT)
        and not name.startswith(ROLLOUTS)
        and name not in (CARD, LINEAGE)
    }


def lineage_json(model: ReleasedModel) -> str:
    """The model and all that it was made from, with digests; no folder of this machine."""
    graph = model.graph
    line = [graph.nodes[model.key], *model.ancestors]
    keys = {node.key for node in line}
    values = {
        "model": {"name": model.name, "key": model.key, "digest": model.manifest.digest},
        "evaluation": model.evaluation.digest if model.evaluation else None,
        "nodes": [
            {
                "key": node.key,
                "kind": node.kind,
                "digest": node.digest,
                "manifest_digest": node.manifest.own_digest if node.manifest else "",
                "manifest": public_values(
                    node.manifest.model_dump(mode="json", exclude={"files", "parents"})
                )
                if node.manifest
                else None,
            }
            for node in line
        ],
        "edges": [
            {"parent": edge.parent, "child": edge.child, "name": edge.name}
            for edge in graph.edges.values()
            if edge.child in keys and edge.parent in keys
        ],
        "files": {name: entry.sha256 for name, entry in released_files(model).items()},
    }
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def write_folder(model: ReleasedModel, card: str, target: str | Path) -> Path:
    """Write the model to a folder that must not exist; return it.

    What was copied is hashed again. Raises StorageError where the folder is there already or can't
    be written, LineageError for a file that changed on the way.
    """
    target = Path(target).expanduser().absolute()
    if target.exists():
        raise StorageError(f"{target} is there already; delete it, or name another folder")
    files = released_files(model)
    draft: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        whole = draft / "model"  # with the usual permissions, which mkdtemp's own folder hasn't
        whole.mkdir()
        for name in files:
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model.folder / name, whole / name)
        copied = hash_files(whole)
        if copied != files:
            changed = sorted(name for name in files if copied.get(name) != files[name])
            raise LineageError(
                f"{model.folder}: {changed[0]} changed while it was copied; nothing was written"
            )
        (whole / LINEAGE).write_text(lineage_json(model), encoding="utf-8")
        (whole / CARD).write_text(card, encoding="utf-8")
        fsync_tree(whole)
        os.rename(whole, target)
    except OSError as error:
        raise StorageError(
            f"can't write {target}: {error.strerror or error}; free space, or name another folder"
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
    return target
