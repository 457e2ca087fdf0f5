"""Settings of a rollout server that make no sense are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import RLConfig
from engine.errors import ConfigError
from engine.trainers.run_plan import check_config

URL = {"url": "http://127.0.0.1:8000"}


def settings(server: dict[str, Any], **rollout: Any) -> RLConfig:
    return RLConfig.model_validate({"rollout": {"engine": "server", "server": server} | rollout})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (settings({}), "needs rollout.server.url"),
        (settings(URL | {"weights": "rsync"}), "weights='rsync' is unknown"),
        (settings(URL | {"weights": "folder"}), "needs rollout.server.reload_url"),
        (settings(URL | {"weights": "none"}), "allow_fixed_policy=true"),
        (settings(URL | {"api": "tgi"}), "rollout.server.weights to folder, or to none"),
        (settings(URL, max_num_seqs=8), "rollout.max_num_seqs=8 has no effect"),
        (settings(URL, tensor_parallel_size=2), "leave it at 1"),
        (settings(URL, engine="native"), r"rollout.server.url=.* has no effect .*engine=native"),
    ],
)
def test_contradictions_are_refused(config: RLConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config)


@pytest.mark.parametrize(
    "server",
    [
        {},
        {"weights": "none", "allow_fixed_policy": True},
        {"api": "tgi", "weights": "folder", "reload_url": "/reload", "version_url": "/info"},
    ],
)
def test_what_fits_is_let_through(server: dict[str, Any]) -> None:
    assert check_config(settings(URL | server)).name == "grpo"
