"""A model in a repository of the Hugging Face hub, in one commit.

The token is that of `hf auth login` or $HF_TOKEN, the hub $HF_ENDPOINT's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, StorageError
from engine.release.folder import released_files
from engine.release.model import ReleasedModel

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelInfo

PREFIX = "hf://"
SECONDS = 60.0  # without a byte, before a request is given up; the hub's own client waits for ever
_ADDRESS = re.compile(r"hf://(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<branch>[\w./-]+))?")
# Of an earlier model, such as one of more shards: its weights must not stay beside new ones.
_WEIGHTS = re.compile(r"(adapter/.*|.*\.(safetensors|bin)(\.index\.json)?)")


@dataclass(frozen=True, slots=True)
class Repository:
    """Where a model goes on the hub."""

    id: str  # e.g. "acme/math-1.5b"
    branch: str | None = None  # None: the main one

    @staticmethod
    def parse(address: str) -> Repository:
        """Read `hf://OWNER/NAME` or `hf://OWNER/NAME@BRANCH`; ConfigError for anything else."""
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise ConfigError(
                f"--to {address!r} is no repository; write hf://OWNER/NAME or hf://OWNER/NAME@BRANCH"
            )
        return Repository(found["id"], found["branch"])


def push(
    model: ReleasedModel, texts: Mapping[str, str], repository: Repository, private: bool
) -> str:
    """Upload a model's files and `texts` (by name) as one commit; return its address.

    The repository, and the branch, are made where they are missing. Weights in it that this model
    doesn't have are removed; other files stay. A commit of somebody else in between refuses this
    one. Raises StorageError for whatever the hub refuses or doesn't answer; nothing is committed
    then.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, set_client_factory
    from huggingface_hub.errors import HFValidationError, HTTPError

    set_client_factory(_client)
    api, name, branch = HfApi(), repository.id, repository.branch
    files = released_files(model)
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        if branch is not None:
            api.create_branch(name, branch=branch, exist_ok=True)
        there = api.model_info(name, revision=branch, timeout=SECONDS)
        new = {*files, *texts}
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *_removed(there, new),
            *(CommitOperationAdd(file, str(model.folder / file)) for file in files),
            *(CommitOperationAdd(file, text.encode()) for file, text in texts.items()),
        ]
        done = api.create_commit(
            name,
            operations,
            commit_message=f"{model.name}, content {model.manifest.digest[:16]}",
            revision=branch,
            parent_commit=there.sha,
        )
    except (OSError, ValueError, RuntimeError, HTTPError, HFValidationError) as error:
        raise StorageError(
            f"{PREFIX}{name} could not be written: {_reason(error)}; nothing was committed; check "
            "the name, the network and the token (hf auth login, or HF_TOKEN with write access)"
        ) from error
    return str(done.commit_url)


def _removed(there: ModelInfo, new: set[str]) -> list[CommitOperationDelete]:
    from huggingface_hub import CommitOperationDelete

    names = [entry.rfilename for entry in there.siblings or ()]
    stale = [name for name in names if name not in new and _WEIGHTS.fullmatch(name)]
    return [CommitOperationDelete(name) for name in stale]


def _client() -> Any:
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = SECONDS
    return client


def _reason(error: BaseException) -> str:
    """The first line of an error, or of what caused it: uploads wrap theirs."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
