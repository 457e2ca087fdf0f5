"""The checked facts of a model to release, and of the model it was trained from.

Anything that can't be read, is missing or was changed raises LineageError: a card must not guess.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from engine.errors import LineageError
from engine.evaluation.lm_eval import FILE, HarnessScore, from_json
from engine.evaluation.summary import EvaluationComparison, read_sets
from engine.lineage.audit import audit
from engine.lineage.graph import MODEL_VERSION, ArtifactNode, Graph, StoredArtifact, artifact_node
from engine.lineage.lookup import PREFIX, review
from engine.storage.artifacts import SOURCE, Manifest, local_path, read_manifest
from engine.storage.filesystem import SECONDS, is_hub_id, read_file, split_revision

CONFIG = "config.json"  # what makes an artifact a model


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
        """Return e.g. "hybridflyte-policy version 3", or an artifact's kind and digest."""
        return self.graph.nodes[self.key].name if self.version is None else self.version.name

    @property
    def line(self) -> list[ArtifactNode]:
        """Return the model and all that it was made from, nearest first."""
        return [self.graph.nodes[self.key], *self.graph.ancestors(self.key)]


def read_model(reference: str, stores: Sequence[str] = ()) -> ReleasedModel:
    """Read a model by the folder of its artifact, `models:/NAME@ALIAS` or `models:/NAME/VERSION`.

    All that it and its evaluation were made from is re-hashed, but for sources. stores: folders or
    s3:// prefixes to search. Raises LineageError for what is missing, changed or no model.
    """
    named = review([reference], stores)
    (start,) = named.starts
    model = _model_node(named.graph, start)
    evaluation = _evaluation_of(named.graph, start, model)
    references = [evaluation.uri] if evaluation else []
    if start.kind == MODEL_VERSION:  # by its number: an alias may move between two looks at it
        name, _, number = start.key.removeprefix(f"{MODEL_VERSION}:").rpartition(":")
        reference = f"{PREFIX}{name}/{number}"
    lineage = review([reference, *references], stores, descendants=False)
    audited = audit(lineage)
    for fault in audited.faults:
        node = lineage.graph.nodes.get(fault.key)
        if node is None or node.kind != SOURCE:
            raise LineageError(
                f"{reference} is not as recorded: {fault.text}; nothing was written; see `python "
                f"-m engine.lineage verify {reference}`"
            )
    assert model.manifest is not None
    version = start if start.kind == MODEL_VERSION else None
    evidence = evaluation.manifest if evaluation else None
    comparison, harness = _scores(evaluation) if evaluation else (None, ())
    notes = tuple(note.text for note in audited.notes)
    folder, graph, key = local_path(model.uri), lineage.graph, model.key
    return ReleasedModel(
        folder, model.manifest, version, graph, key, evidence, comparison, harness, notes
    )


def _model_node(graph: Graph, start: ArtifactNode) -> ArtifactNode:
    """Return the artifact that a version was registered from, or the one that was named."""
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
            f"{node.name} is no model: it has no {CONFIG}; give an sft, an rl or models:/NAME@ALIAS"
        )
    return node


def _evaluation_of(graph: Graph, start: ArtifactNode, model: ArtifactNode) -> ArtifactNode | None:
    """Return the evaluation that a version names, else the model's newest; None without any."""
    recorded, uri = (start.facts.get(f"evaluation_{part}", "") for part in ("manifest", "uri"))
    edges = [edge for edge in graph.children(model.key) if edge.name == "policy"]
    evaluations = {
        node.manifest.own_digest: node
        for node in (graph.nodes[edge.child] for edge in edges)
        if node.kind == "evaluation" and node.manifest is not None
    }
    if not recorded:
        nodes = evaluations.values()
        return max(nodes, key=lambda node: node.created_at or datetime.min, default=None)
    if recorded in evaluations:
        return evaluations[recorded]
    manifest = read_manifest(uri)
    parents = {parent.name: parent.digest for parent in manifest.parents}
    if manifest.own_digest != recorded or parents.get("policy") != model.digest:
        raise LineageError(
            f"{uri} is not the evaluation of {start.name} that its tags name; restore it, or "
            "export the model's folder with another evaluation in its store"
        )
    return artifact_node(StoredArtifact(uri, manifest))


def _scores(evaluation: ArtifactNode) -> tuple[EvaluationComparison, tuple[HarnessScore, ...]]:
    """Return an evaluation's comparison, and the model's scores in the harness if it was run."""
    harness: tuple[HarnessScore, ...] = ()
    if evaluation.manifest is not None and FILE in evaluation.manifest.files:
        where = f"{evaluation.uri}/{FILE}"
        harness = tuple(from_json(read_file(where, LineageError), where).get("rl", ()))
    return read_sets(evaluation.uri)[0].comparison, harness


CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Base:
    """The model that the first stage of a model's lineage started from."""

    path: str  # folder, address or hub id with its commit, as recorded; empty: random weights
    digest: str = ""  # of a folder's content

    @property
    def hub_id(self) -> str:
        """Return `owner/name` of a model on the hub; else ""."""
        return split_revision(self.path)[0] if is_hub_id(self.path) else ""

    def sentence(self) -> str:
        """Return it in words for a card, without the folders of this machine."""
        if not self.path:
            return "none: its weights began at random"
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
    """Return the model that the oldest stage of a line, nearest first, began with, if one says."""
    base = None
    for node in line:
        config = node.draft.config
        start = config.get("model")
        if node.kind in ("sft", "start_model") and isinstance(start, dict) and "path" in start:
            base = Base(str(start["path"]), str(config.get("start_digest") or ""))
        elif node.kind == "model" and config.get("source"):
            base = Base(str(config["source"]), node.manifest.digest if node.manifest else "")
    return base


def base_licence(base: Base) -> Licence | None:
    """Return what the base's own card says, here or on the hub; None where it can't be read."""
    values = _hub_card(base.path) if base.hub_id else _folder_card(Path(base.path))
    licence = values.get("license")
    if isinstance(licence, list):
        licence = next(iter(licence), None)
    if not licence:
        return None
    owner = base.hub_id or base.path.rstrip("/").rsplit("/", 1)[-1]
    name, link = (str(values.get(f"license_{part}") or "") for part in ("name", "link"))
    return Licence(str(licence), name, link, f"the card of `{owner}`")


def _folder_card(file: Path) -> dict[str, object]:
    """Return the front matter of a card; empty where there is none."""
    import yaml
    from huggingface_hub import ModelCard

    file = file / CARD if file.is_dir() else file
    if file.is_file() and file.name == CARD:
        with suppress(OSError, ValueError, yaml.YAMLError):  # a card that isn't one says nothing
            return dict(ModelCard.load(file, ignore_metadata_errors=True).data.to_dict())
    return {}


def _hub_card(path: str) -> dict[str, object]:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    name, revision = split_revision(path)
    unavailable = (OSError, HTTPError, HFValidationError)
    with suppress(*unavailable):
        card = HfApi().model_info(name, revision=revision, timeout=SECONDS).card_data
        return card.to_dict() if card else {}
    with suppress(*unavailable):  # without the hub, what its cache on this machine has
        file = hf_hub_download(name, CARD, revision=revision, local_files_only=True)
        return _folder_card(Path(file))
    return {}
