"""Middleware in vLLM's server: its `/health` says which model it serves.

vLLM imports it by name (`--middleware engine.serve.health.identify`); what to say is in the
environment.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

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
