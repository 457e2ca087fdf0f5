"""Models on the Hugging Face hub: `owner/name`, or `owner/name@revision` (a branch, tag or commit).

What lives here: reading such a name, which commit it means now, and why transformers couldn't load
what it names. Loading is in `engine.models` and `engine.data`, which both take these names.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from engine.errors import ModelError

SECONDS = 10.0  # the hub's, for one answer
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(path: str | Path) -> bool:
    """Whether a value looks like a model on the hub and not like a folder."""
    name, _, _ = str(path).partition("@")
    looks = name.count("/") == 1 and not name.startswith((".", "/", "~")) and " " not in name
    return looks and not Path(path).exists()


def require_model_name(path: str | Path, setting: str = "model.path") -> None:
    """Raise ModelError for a value that is neither a folder here nor looks like a hub id.

    transformers would take the name of a folder that is missing for a hub id, and ask the hub for
    a minute.
    """
    if not Path(path).exists() and not is_hub_id(path):
        raise ModelError(
            f"{setting}={str(path)!r} does not exist; give a folder written by save_pretrained, "
            "a hub id (owner/name), or leave it empty for a model from scratch"
        )


def split_revision(path: str | Path) -> tuple[str, str | None]:
    """A hub id and its revision, None for the newest; a folder's path as it is.

    >>> split_revision("Qwen/Qwen2.5-0.5B@main")
    ('Qwen/Qwen2.5-0.5B', 'main')
    """
    if not is_hub_id(path):
        return str(path), None
    name, _, revision = str(path).partition("@")
    return name, revision or None


def pin_revision(path: str, setting: str = "model.path") -> str:
    """A hub id with the commit that it means now, `owner/name@commit`; a folder as it is.

    Without the hub, that of the newest copy in the hub's local cache. Raises ModelError where
    neither has it, and for a folder that is missing.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    require_model_name(path, setting)
    name, revision = split_revision(path)
    if not is_hub_id(path) or _COMMIT.fullmatch(revision or ""):
        return path
    unavailable = (OSError, HTTPError, HFValidationError)  # network, permission, unknown id
    try:
        # Asked first because a download waits without end for a silent network. The file is what
        # the cache remembers the branch by.
        HfApi().model_info(name, revision=revision, timeout=SECONDS)
        file = hf_hub_download(name, "config.json", revision=revision, etag_timeout=SECONDS)
    except unavailable as error:
        try:
            file = hf_hub_download(name, "config.json", revision=revision, local_files_only=True)
        except unavailable:
            raise ModelError(
                f"{setting}={path!r} is no folder, and neither the Hugging Face hub "
                f"({type(error).__name__}) nor its cache here says which commit it is; check the "
                "name, the network and HF_TOKEN, or give a folder or NAME@COMMIT"
            ) from error
    return f"{name}@{Path(file).parent.name}"


def refuse_own_code(path: str, setting: str = "model.trust_remote_code") -> None:
    """Raise ModelError for a model whose folder brings Python code of its own (`auto_map`)."""
    from huggingface_hub import hf_hub_download

    file = Path(path) / "config.json"
    if is_hub_id(path):
        name, revision = split_revision(path)
        file = Path(hf_hub_download(name, "config.json", revision=revision, etag_timeout=SECONDS))
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return  # what can't be read is refused where the model is loaded
    if isinstance(config, dict) and config.get("auto_map"):
        raise ModelError(
            f"{setting}=true, and {path} brings Python code ({sorted(config['auto_map'])}), which "
            "is never run here; give a model that transformers has a class for, or set it to "
            "false where it has one for this one, too"
        )


def loading_error(error: Exception) -> str:
    """transformers' reason why a folder or hub id can't be loaded, in one line.

    Everything is loaded with `trust_remote_code=False`, so code that a folder brings is a reason.
    """
    text = str(error).strip()
    if "trust_remote_code" in text:
        return (
            "it needs code of its own, which is never run; give a model that transformers has a "
            "class for itself"
        )
    return text.splitlines()[0] if text else type(error).__name__
