"""Every configuration in engine/config/presets is valid and changes something."""

from __future__ import annotations

from pathlib import Path

import pytest
from flyte_runs import REPOSITORY

from engine.config import PipelineConfig, load_config
from engine.trainers.run_plan import check_config

SHIPPED = sorted((REPOSITORY / "engine" / "config" / "presets").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_is_valid(path: Path) -> None:
    config = load_config(path)
    check_config(config.rl)
    assert config != PipelineConfig()


def test_the_named_ones_are_shipped() -> None:
    assert {"gsm8k_smoke", "ppo"} <= {path.stem for path in SHIPPED}
