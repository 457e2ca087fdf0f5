"""Whether a server's settings make sense together; nothing is asked of the server."""

from __future__ import annotations

from engine.config.server import ServerConfig
from engine.errors import ConfigError
from engine.rollout.server import vllm_hook  # noqa: F401  (it registers itself)
from engine.rollout.server.weights import check_hook


def check_settings(settings: ServerConfig) -> None:
    """Raise ConfigError for what is missing, unknown or contradicts another setting."""
    if not settings.url:
        raise ConfigError(
            "rollout.engine=server needs rollout.server.url, such as http://127.0.0.1:8000"
        )
    check_hook(settings.weights)
    if settings.api == "tgi" and settings.weights == "vllm":
        raise ConfigError(
            "rollout.server.api=tgi with weights=vllm: these are vLLM's own endpoints; set "
            "rollout.server.weights to folder, or to none"
        )
    if settings.weights == "folder" and not settings.reload_url:
        raise ConfigError(
            "rollout.server.weights=folder needs rollout.server.reload_url, which is told to load "
            "a folder; or set weights=vllm, or none"
        )
    for name in ("reload_url", "allow_fixed_policy"):
        read = {"reload_url": "folder", "allow_fixed_policy": "none"}[name]
        value = getattr(settings, name)
        if value and settings.weights != read:
            raise ConfigError(
                f"rollout.server.{name}={value} has no effect with weights={settings.weights}; "
                f"remove it, or set rollout.server.weights={read}"
            )
