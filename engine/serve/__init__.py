"""A checked model behind an OpenAI-compatible endpoint: `python -m engine.serve MODEL`.

This module finds the model that is served, and has the middleware by which vLLM's `/health` names
it. `vllm_server` starts vLLM's server; `api_server` is a small one, and `native_backend` the native
engine behind it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import LineageError, ModelError
from engine.lineage.lookup import is_reference, open_registry
from engine.storage.artifacts import local_path, read_manifest, verify
from engine.storage.digests import MANIFEST, tree_digest
from engine.tracking.model_versions import ARTIFACT_TAG, MANIFEST_TAG, intact_copy

if TYPE_CHECKING:
    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import Response


IDENTITY_VARIABLE = "HYBRIDFLYTE_SERVED_MODEL"
IDENTIFY = f"{__name__}.identify"


async def identify(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Answer a healthy server's `/health` with the model's identity; leave all else as it is."""
    response = await call_next(request)
    if request.url.path != "/health" or response.status_code != 200:
        return response
    from starlette.responses import JSONResponse

    model = json.loads(os.environ[IDENTITY_VARIABLE])
    return JSONResponse({"status": "ok", "engine": "vllm", "model": model})


@dataclass(frozen=True, slots=True)
class Identity:
    """The description of a model that `/health` gives."""

    name: str  # its id in the API, e.g. "hybridflyte-policy"
    reference: str  # as the user named it, e.g. "models:/hybridflyte-policy@champion"
    version: str  # in the registry, e.g. "3"; empty for a folder
    digest: str  # SHA-256 of its content, as the registry and its manifest have it
    manifest_digest: str  # of its manifest.json; empty where it has none


def resolve(
    reference: str, scratch: Path, name: str = "", trusted: Collection[str] | None = None
) -> tuple[Path, Identity]:
    """Return the folder of a model, re-hashed, and what it is known by.

    A registered version is MLflow's own copy, which must be what the version's tags name. A folder,
    or what an address (s3://…) downloads, must be as its manifest says, where it has one.
    `scratch`: for downloads. trusted: the public keys (hex) by one of which its manifest must be
    signed; None: it need not be. Raises LineageError for other content, TrackingError,
    StorageError, and ModelError for a folder without a model.
    """
    if is_reference(reference):
        tracker = open_registry()
        version = tracker.model_version(reference)
        folder, tags = intact_copy(tracker, version, scratch), version.tags
        digest, manifest_digest = tags[ARTIFACT_TAG], tags.get(MANIFEST_TAG, "")
        name, number = name or version.name, version.version
        identity = Identity(name, reference, number, digest, manifest_digest)
    else:
        folder, manifest_digest = local_path(reference), ""
        _require_model(folder, reference)
        if (folder / MANIFEST).is_file():
            manifest = verify(folder)
            digest, manifest_digest = manifest.digest, manifest.own_digest
        else:
            digest = tree_digest(folder)
        identity = Identity(name or folder.name, reference, "", digest, manifest_digest)
    _require_model(folder, reference)
    if trusted is not None and (fault := read_manifest(folder).signature_fault(trusted)):
        raise LineageError(f"{reference} is not served: {fault}")
    return folder, identity


def _require_model(folder: Path, reference: str) -> None:
    if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise ModelError(f"{reference} has no config.json; give a model's folder or version")
