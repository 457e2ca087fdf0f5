"""What is known of a model that leaves: its artifact, version, lineage and evaluation, all checked.

Whatever of it can't be read, is missing or was changed is a LineageError: a card must not guess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import LineageError
from engine.evaluation.lm_eval import FILE, HarnessScore, from_json
from engine.evaluation.summary import EvaluationComparison
from engine.lineage.audit import audit
from engine.lineage.graph import MODEL_VERSION, ArtifactNode, Graph, artifact_node
from engine.lineage.index import StoredArtifact
from engine.lineage.registry import PREFIX
from engine.lineage.review import review
from engine.storage.artifacts import local_path
from engine.storage.filesystem import read_file
from engine.storage.manifest import SOURCE, Manifest, read_manifest

CONFIG = "config.json"  # what makes an artifact a model
COMPARISON = "comparison.json"


@dataclass(frozen=True, slots=True)
class ReleasedModel:
    """A model artifact as recorded, and what belongs to it."""

    folder: Path  # its artifact, on this machine
    manifest: Manifest  # of that
    version: ArtifactNode | None  # of the registry, where the model was named by it
    graph: Graph  # the model, its evaluation, and all that both were made from
    key: str  # the model's node in the graph
    evaluation: Manifest | None
    comparison: EvaluationComparison | None  # of the evaluation; its `after` is this model
    harness: tuple[HarnessScore, ...]  # of the evaluation, where the lm-evaluation-harness was run
    notes: tuple[str, ...]  # what could not be checked

    @property
    def name(self) -> str:
        """E.g. "hybridflyte-policy version 3", or kind and digest for an artifact by its folder."""
        return self.graph.nodes[self.key].name if self.version is None else self.version.name

    @property
    def ancestors(self) -> list[ArtifactNode]:
        """All that the model was made from, nearest first."""
        return self.graph.ancestors(self.key)


def read_model(reference: str, stores: Sequence[str] = ()) -> ReleasedModel:
    """Read a model by the folder of its artifact, `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    It, its evaluation and all that both were made from are re-hashed; sources made elsewhere may
    have changed. stores: folders or s3:// prefixes to search; else its own and this machine's.
    Raises LineageError for what is missing, unreadable or not as recorded and for an artifact that
    is no model, TrackingError and StorageError where MLflow or a store doesn't answer.
    """
    found = review([reference], stores)
    (start,) = found.starts
    model = _model_node(found.graph, start)
    evaluation = _evaluation_of(found.graph, start, model)
    # By its number: an alias may move between two looks at it.
    references = [_pinned(start, reference), *([evaluation.uri] if evaluation else [])]
    whole = review(references, stores, descendants=False)
    checked = audit(whole)
    for fault in checked.faults:
        node = whole.graph.nodes.get(fault.key)
        if node is None or node.kind != SOURCE:
            raise LineageError(
                f"{reference} is not as recorded: {fault.text}; nothing was written; see `python "
                f"-m engine.lineage verify {reference}`"
            )
    assert model.manifest is not None
    return ReleasedModel(
        local_path(model.uri),
        model.manifest,
        start if start.kind == MODEL_VERSION else None,
        whole.graph,
        model.key,
        evaluation.manifest if evaluation else None,
        _comparison(evaluation.uri) if evaluation else None,
        _harness(evaluation) if evaluation else (),
        tuple(note.text for note in checked.notes),
    )


def _pinned(start: ArtifactNode, reference: str) -> str:
    """A model version by its number; any other reference as it is."""
    if start.kind != MODEL_VERSION:
        return reference
    name, _, number = start.key.removeprefix(f"{MODEL_VERSION}:").rpartition(":")
    return f"{PREFIX}{name}/{number}"


def _model_node(graph: Graph, start: ArtifactNode) -> ArtifactNode:
    """The artifact that a version was registered from, or the one that was named."""
    node = start
    if start.kind == MODEL_VERSION:
        node = graph.nodes[graph.parents(start.key)[0].parent]
    if node.missing or node.manifest is None:
        raise LineageError(
            f"{start.name}: {node.missing or 'it is no artifact with a manifest'}; name its store "
            "with --store, or give the folder of a model that a stage published"
        )
    if CONFIG not in node.manifest.files:
        raise LineageError(
            f"{node.name} is no model: it has no {CONFIG}; give an artifact of kind sft or rl, or "
            "models:/NAME@ALIAS"
        )
    return node


def _evaluation_of(graph: Graph, start: ArtifactNode, model: ArtifactNode) -> ArtifactNode | None:
    """The evaluation that a version names, else the newest one of the model; None without any."""
    wanted, uri = (start.facts.get(f"evaluation_{part}", "") for part in ("manifest", "uri"))
    found = [
        graph.nodes[edge.child]
        for edge in graph.children(model.key)
        if edge.name == "policy" and graph.nodes[edge.child].kind == "evaluation"
    ]
    if not wanted:
        made = [(node.created_at, node) for node in found if node.created_at is not None]
        return max(made, key=lambda one: one[0])[1] if made else None
    for node in found:
        if node.manifest is not None and node.manifest.own_digest == wanted:
            return node
    manifest = read_manifest(uri)
    of = {parent.name: parent.digest for parent in manifest.parents}
    if manifest.own_digest != wanted or of.get("policy") != model.digest:
        raise LineageError(
            f"{uri} is not the evaluation of {start.name} that its tags name; restore it, or "
            "export the model's folder with another evaluation in its store"
        )
    return artifact_node(StoredArtifact(uri, manifest))


def _comparison(evaluation: str) -> EvaluationComparison:
    where = f"{evaluation}/{COMPARISON}"
    try:
        values = json.loads(read_file(where, LineageError))
    except (FileNotFoundError, ValueError) as error:
        raise LineageError(f"{where} can't be read ({error}); evaluate the model again") from error
    return EvaluationComparison.from_dict(values)


def _harness(evaluation: ArtifactNode) -> tuple[HarnessScore, ...]:
    if evaluation.manifest is None or FILE not in evaluation.manifest.files:
        return ()
    where = f"{evaluation.uri}/{FILE}"
    return tuple(from_json(read_file(where, LineageError), where).get("rl", ()))
