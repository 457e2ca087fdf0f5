"""A model's card: what it is, its scores with intervals, data, settings and lineage, as Markdown.

The front matter is Hugging Face's (`model-index` with the results). Digests are whole; folders of
this machine are left out.
"""

from __future__ import annotations

import re

import yaml

from engine.lineage.graph import ArtifactNode
from engine.redaction import presentable
from engine.release.base import Base, Licence
from engine.release.markdown import line, table
from engine.release.model import ReleasedModel
from engine.release.scores import results, score_sections
from engine.storage.hub import is_hub_id
from engine.storage.manifest import SOURCE

# The nearest stage of each kind.
SETTINGS_OF = (
    *("dataset", "model", "start_model", "sft", "pairs", "reward_model", "preference", "rl"),
)
_PLACE = re.compile(r"(?:[a-z][a-z0-9+.-]*://|/|~)\S*")  # an address or a folder
_HUB_DATASET = re.compile(r"hf://([\w.-]+(?:/[\w.-]+)?)")
UNKNOWN = "unknown: no card of the base says it"
OWNERS = "the owner's to choose"

USE = """```python
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = PreTrainedTokenizerFast.from_pretrained("{name}")
```"""


def model_card(
    model: ReleasedModel, base: Base | None, licence: Licence | None, repository: str
) -> str:
    """The whole README.md. `repository` is what a reader loads the model by."""
    sections = [
        f"# {line(model.name)}",
        _facts(model, base, licence),
        *score_sections(model),
        "## Data\n\n" + _data(model),
        "## Settings\n\n" + _settings(model),
        "## Lineage\n\n" + _lineage(model),
        "## Use\n\n" + USE.format(name=repository),
    ]
    body = presentable("\n\n".join(sections))
    return f"---\n{_front_matter(model, base, licence)}\n---\n\n{body}\n"


def _front_matter(model: ReleasedModel, base: Base | None, licence: Licence | None) -> str:
    from huggingface_hub import ModelCardData

    kinds = [node.kind for node in (model.graph.nodes[model.key], *model.ancestors)]
    said = licence or Licence("")
    found = results(model, _source_name(model))
    data = ModelCardData(
        base_model=(base.hub_id or None) if base else None,
        datasets=_hub_datasets(model) or None,
        library_name="transformers",
        license=said.id or None,
        license_name=said.name or None,
        license_link=said.link or None,
        model_name=model.name if found else None,
        eval_results=found or None,
        pipeline_tag="text-generation",
        tags=["hybridflyte", *(kind for kind in ("sft", "preference", "rl") if kind in kinds)],
    )
    return str(data.to_yaml())


def _facts(model: ReleasedModel, base: Base | None, licence: Licence | None) -> str:
    manifest, rows = model.manifest, []
    if model.version is not None:
        facts = model.version.facts
        if facts.get("aliases"):
            rows.append(("alias", facts["aliases"]))
        if facts.get("promoted_at"):
            why = f": {facts['promotion_reason']}" if facts.get("promotion_reason") else ""
            rows.append(("promoted", facts["promoted_at"] + why))
    rows += [
        ("content digest (SHA-256)", f"`{manifest.digest}`"),
        ("manifest digest", f"`{manifest.own_digest}`"),
        ("trained from", base.sentence() if base else "not recorded"),
        ("licence", _licence(base, licence)),
        ("made by", f"stage `{manifest.kind}`, code `{manifest.code_version}`"),
        ("made at", f"{manifest.created_at:%Y-%m-%d %H:%M} UTC"),
    ]
    return table(("", ""), rows)


def _licence(base: Base | None, licence: Licence | None) -> str:
    if licence is None:
        return OWNERS if base is not None and not base.path else UNKNOWN
    named = " ".join(filter(None, (licence.id, licence.name, licence.link)))
    return f"{named} ({licence.source})" if licence.source else named


def _data(model: ReleasedModel) -> str:
    nodes = [node for node in model.ancestors if node.kind in ("dataset", "pairs", SOURCE)]
    rows = [(_name(node), f"`{node.digest}`", _counts(node)) for node in nodes]
    return table(("", "content digest", ""), rows) if rows else "No data are recorded."


def _settings(model: ReleasedModel) -> str:
    """What each stage was made by, the model's own first."""
    stages = [model.graph.nodes[model.key], *model.ancestors]
    nearest: dict[str, ArtifactNode] = {}
    for node in stages:
        if node.kind in SETTINGS_OF and node.config:
            nearest.setdefault(node.kind, node)
    return "\n\n".join(_block(node) for node in nearest.values()) or "None are recorded."


def _block(node: ArtifactNode) -> str:
    text = yaml.safe_dump(public_values(node.config), sort_keys=False, allow_unicode=True)
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text) or ["``"]))
    title = f"{node.kind} <code>{node.digest[:12]}</code>"
    return f"<details><summary>{title}</summary>\n\n{fence}yaml\n{text}{fence}\n\n</details>"


def _lineage(model: ReleasedModel) -> str:
    rows = []
    for node in (model.graph.nodes[model.key], *model.ancestors):
        own = node.manifest
        made = (f"`{own.own_digest}`", f"`{own.code_version}`") if own else ("", "")
        rows.append((_name(node), f"`{node.digest}`", *made))
    return (
        "All that it was made from, nearest first; `lineage.json` has it for programs.\n\n"
        + table(("", "content digest", "manifest digest", "code"), rows)
    )


def public_values(value: object) -> object:
    """JSON values in which a folder or address is its last part alone.

    >>> public_values({"path": "/home/me/models/base", "lr": 0.1})
    {'path': '…/base', 'lr': 0.1}
    """
    if isinstance(value, dict):
        return {key: public_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [public_values(one) for one in value]
    if isinstance(value, str) and _PLACE.fullmatch(value) and not value.startswith("hf://"):
        return "…/" + value.rstrip("/").rsplit("/", 1)[-1]
    return value


def _source_name(model: ReleasedModel) -> str:
    """Where the problems are from: a dataset of the hub, or the name of their source."""
    found = _hub_datasets(model)
    if found:
        return found[0]
    data = next((_data_settings(node) for node in model.ancestors if _data_settings(node)), {})
    return str(data.get("source") or "unknown")


def _hub_datasets(model: ReleasedModel) -> list[str]:
    """The ids of the hub's datasets among the data."""
    found = []
    for node in model.ancestors:
        data = _data_settings(node)
        path = str(data.get("path") or "")
        if match := _HUB_DATASET.match(path):
            found.append(match[1])
        elif data.get("source") == "gsm8k" and is_hub_id(path):
            found.append(path)
    return list(dict.fromkeys(found))


def _data_settings(node: ArtifactNode) -> dict[str, object]:
    data = node.config.get("data") if node.kind == "dataset" else None
    return data if isinstance(data, dict) else {}


def _counts(node: ArtifactNode) -> str:
    """Rows of a dataset's splits, as its stage measured them."""
    found = {name: value for name, value in node.metrics.items() if name != "seconds"}
    return ", ".join(f"{name} {value:,.6g}" for name, value in found.items())


def _name(node: ArtifactNode) -> str:
    """Kind, and of a source the last part of where it came from."""
    return f"{node.kind} {public_values(node.label)}" if node.kind == SOURCE else node.kind
