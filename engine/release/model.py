"""What is known of a model that leaves, all checked, and of the model it was trained from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import LineageError
from engine.evaluation.lm_eval import FILE, HarnessScore, from_json
from engine.evaluation.summary import EvaluationComparison
from engine.lineage.audit import audit
from engine.lineage.graph import MODEL_VERSION, ArtifactNode, Graph, StoredArtifact, artifact_node
from engine.lineage.lookup import PREFIX, review
from engine.storage.artifacts import SOURCE, Manifest, local_path, read_manifest
from engine.storage.filesystem import SECONDS, is_hub_id, read_file, split_revision

# What is known of a model that leaves: its artifact, version, lineage and evaluation, all
# checked.
#
# Whatever of it can't be read, is missing or was changed is a LineageError: a card must not
# guess.

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


# The model that training began with, and its licence, as far as they are recorded.

CARD = "README.md"
STARTS = ("sft", "start_model")  # the stages that record which model they began with
FROM_SCRATCH = "none: its weights began at random"


@dataclass(frozen=True, slots=True)
class Base:
    """What the first stage of a model's line began with."""

    path: str  # folder, address or hub id with its commit, as recorded; empty: random weights
    digest: str = ""  # of a folder's content

    @property
    def hub_id(self) -> str:
        """`owner/name` of a model on the hub; else empty."""
        return split_revision(self.path)[0] if is_hub_id(self.path) else ""

    def sentence(self) -> str:
        """For a card, without the folders of this machine."""
        if not self.path:
            return FROM_SCRATCH
        if self.hub_id:
            revision = split_revision(self.path)[1]
            return f"`{self.hub_id}`" + (f" at commit `{revision}`" if revision else "")
        digest = f", content digest `{self.digest}`" if self.digest else ""
        return f"the folder `{self.path.rstrip('/').rsplit('/', 1)[-1]}`{digest}"


@dataclass(frozen=True, slots=True)
class Licence:
    """A licence as the hub's cards name it."""

    id: str  # e.g. "apache-2.0", or "other" with a name and a link
    name: str = ""
    link: str = ""
    source: str = ""  # who says so, e.g. "the card of `Qwen/Qwen2.5-0.5B`"


def find_base(line: Iterable[ArtifactNode]) -> Base | None:
    """The model that the oldest stage began with; None where no stage says.

    `line`: a model and all that it was made from, nearest first. A warm start, or the stage in its
    place, records the model in its settings, a fetched one where it came from.
    """
    base = None
    for node in line:
        config = node.config
        start = config.get("model")
        if node.kind in STARTS and isinstance(start, dict) and "path" in start:
            base = Base(str(start["path"]), str(config.get("start_digest") or ""))
        elif node.kind == "model" and config.get("source"):
            digest = node.manifest.digest if node.manifest else ""
            base = Base(str(config["source"]), digest)
    return base


def base_licence(base: Base) -> Licence | None:
    """What the base's own card says; None for a base without one, or one that can't be read.

    The card is the README.md of a folder. For a hub id it is asked of the hub, else taken from the
    hub's cache on this machine.
    """
    values = _hub_card(base.path) if base.hub_id else _folder_card(Path(base.path))
    found = values.get("license")
    if isinstance(found, list):
        found = found[0] if found else None
    if not found:
        return None
    of = base.hub_id or base.path.rstrip("/").rsplit("/", 1)[-1]
    name, link = (str(values.get(f"license_{part}") or "") for part in ("name", "link"))
    return Licence(str(found), name, link, f"the card of `{of}`")


def _folder_card(file: Path) -> dict[str, object]:
    """The front matter of a card; empty where there is none."""
    import yaml
    from huggingface_hub import ModelCard

    file = file / CARD if file.is_dir() else file
    if not file.is_file() or file.name != CARD:
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        values: dict[str, object] = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, yaml.YAMLError):  # a card that isn't one says nothing
        return {}
    return values


def _hub_card(path: str) -> dict[str, object]:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    name, revision = split_revision(path)
    unavailable = (OSError, HTTPError, HFValidationError)
    with suppress(*unavailable):  # without the hub, what its cache on this machine has
        card = HfApi().model_info(name, revision=revision, timeout=SECONDS).card_data
        return card.to_dict() if card else {}
    try:
        return _folder_card(
            Path(hf_hub_download(name, CARD, revision=revision, local_files_only=True))
        )
    except unavailable:
        return {}
