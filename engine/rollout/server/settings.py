"""Whether a server's settings make sense together; nothing is asked of the server."""

from __future__ import annotations

from engine.config import RolloutConfig, ServerConfig
from engine.errors import ConfigError
from engine.rollout.server import vllm_weights  # noqa: F401  (it registers itself)
from engine.rollout.server.weights import check_hook


def check_rollout(config: RolloutConfig) -> None:
    """Raise ConfigError for settings of a run that don't go together with a server."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={config.tensor_parallel_size} with "
            "rollout.engine=server: how many devices the server decodes on is settled where it is "
            "started; leave it at 1"
        )
    server = config.server
    check_settings(server)
    if server.weights == "none" and not server.allow_fixed_policy:
        raise ConfigError(
            "rollout.server.weights=none leaves the server at the policy that it was started with, "
            "while training moves the trainer's; choose a hook that brings it new weights, or set "
            "rollout.server.allow_fixed_policy=true to sample from the old ones"
        )


def check_settings(settings: ServerConfig) -> None:
    """Raise ConfigError for what is missing, unknown or contradicts another setting."""
    if not settings.addresses:
        raise ConfigError(
            "rollout.engine=server needs rollout.server.url, such as http://127.0.0.1:8000, or "
            "several addresses in rollout.server.urls"
        )
    if settings.url and settings.urls:
        raise ConfigError(
            f"rollout.server.url={settings.url} beside rollout.server.urls; put it among the urls"
        )
    for name in ("reload_url", "version_url"):
        value = getattr(settings, name)
        if len(settings.urls) > 1 and "://" in value:
            raise ConfigError(
                f"rollout.server.{name}={value} is one address, and rollout.server.urls names "
                f"{len(settings.urls)} servers; give a path, which is asked of each"
            )
    check_hook(settings.weights)
    if settings.api == "tgi" and settings.weights == "vllm":
        raise ConfigError(
            "rollout.server.api=tgi with weights=vllm: these are vLLM's own endpoints; set "
            "rollout.server.weights to folder, or to none"
        )
    if settings.weights == "folder" and not settings.reload_url:
        raise ConfigError(
            "rollout.server.weights=folder needs rollout.server.reload_url, which has to load "
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
