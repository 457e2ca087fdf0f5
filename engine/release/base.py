"""The model that training began with, and its licence, as far as they are recorded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.lineage.graph import ArtifactNode
from engine.storage.hub import SECONDS, is_hub_id, split_revision

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
