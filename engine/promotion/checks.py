"""What must hold before anything moves: artifacts as recorded, and the registry's copy too."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.console import display_path
from engine.errors import LineageError
from engine.lineage.audit import audit
from engine.lineage.review import review
from engine.storage.artifacts import local_path
from engine.storage.manifest import SOURCE, read_manifest
from engine.tracking.copies import intact_copy
from engine.tracking.registry import ModelRegistry, ModelVersion

DATASETS = ("dataset", "pairs")  # kinds of artifacts with prompts that were trained on


def require_unmodified(references: Sequence[str]) -> list[Path]:
    """Re-hash artifacts and all that they were made from; return the datasets among them.

    Raises LineageError for what was changed, edited or is missing. Sources made elsewhere are left
    out: a folder that data arrives in changes every day.
    """
    found = review(references, descendants=False)
    nodes = found.graph.nodes
    faults = [
        finding.text
        for finding in audit(found).faults
        if finding.key not in nodes or nodes[finding.key].kind != SOURCE
    ]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise LineageError(
            f"what the promotion is based on is not as recorded: {faults[0]}{more}; nothing was "
            "moved; see `python -m engine.lineage verify`, then make the artifact again"
        )
    return [local_path(node.uri) for node in nodes.values() if node.kind in DATASETS]


def require_intact_copy(registry: ModelRegistry, version: ModelVersion) -> None:
    """Re-hash the registry's own copy of a version, which is what gets served.

    Raises LineageError when it is not the content that the version's tags name, or has none.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="hybridflyte-promotion-") as scratch:
            intact_copy(registry, version, Path(scratch))
    except LineageError as error:
        raise LineageError(f"{error}; nothing was moved") from error


def check_evidence(dataset: Path, policy: Path, evaluation: Path) -> str:
    """Raise LineageError unless the evaluation compared `policy` on `dataset`.

    Returns the dataset's digest. Whether files were changed since is checked by `promote`.
    """
    evidence = read_manifest(evaluation)
    if evidence.kind != "evaluation":
        raise LineageError(
            f"evaluation={display_path(evaluation)} is an artifact of kind {evidence.kind!r}; give "
            "the folder of an evaluation"
        )
    parents = {parent.name: parent.digest for parent in evidence.parents}
    for name, folder in (("dataset", dataset), ("policy", policy)):
        digest = read_manifest(folder).digest
        if parents.get(name) != digest:
            raise LineageError(
                f"the evaluation {display_path(evaluation)} is of {name} "
                f"{parents.get(name, 'unknown')[:12]}, and {name}={display_path(folder)} is "
                f"{digest[:12]}; give the artifacts of one run"
            )
    return parents["dataset"]
