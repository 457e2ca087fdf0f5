"""Evaluation as a map task: the tables and figures of one machine, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flytekit.core.context_manager import FlyteEntities
from flytekit.types.directory import FlyteDirectory
from promotion_bench import EVALUATE, Bench, new_run

from engine.config import EvaluateConfig
from engine.errors import ConfigError
from engine.evaluation.scoring import share_of
from engine.stages.profiles import LAPTOP
from engine.stages.settings import EvaluationSettings
from engine.storage.artifacts import read_manifest
from tasks.host import TableFile
from tasks.stages import evaluate


def evaluated(bench: Bench, models: tuple[Path, Path], **changes: Any) -> Any:
    return evaluate(
        LAPTOP,
        run=new_run(),
        dataset=FlyteDirectory(str(bench.dataset)),
        warm_start=FlyteDirectory(str(models[0])),
        policy=FlyteDirectory(str(models[1])),
        settings=EvaluationSettings(
            data=bench.data, config=EVALUATE.model_copy(update=changes), seed=0
        ),
    )


def test_parts_make_what_one_machine_makes(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    models = bench.model(seed=1), bench.model(seed=2)
    known = list(FlyteEntities.entities)
    whole = evaluated(bench, models)
    assert "part 1" not in capsys.readouterr().out
    parts = evaluated(bench, models, map_parts=3)
    out = capsys.readouterr().out
    assert [f"part {n} of 3 starts" in out for n in (1, 2, 3)] == [True] * 3
    one, other = (Path(str(made.evaluation.path)) for made in (whole, parts))
    for name in ("rows_warm_start.parquet", "rows_rl.parquet", "comparison.json", "sets.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert read_manifest(one).config == read_manifest(other).config, "comparable by the gate"
    assert parts.rows_rl.open(TableFile).all().path == other / "rows_rl.parquet"
    assert FlyteEntities.entities == known, "nothing more would be registered"


def test_shares_are_consecutive_and_cover_all() -> None:
    shares = [share_of(10, (part, 4)) for part in range(4)]
    assert [n for one in shares for n in range(10)[one]] == list(range(10))
    assert {len(range(10)[one]) for one in shares} == {2, 3}
    with pytest.raises(ConfigError, match=r"evaluate.map_parts=11 is more than the 10 problems"):
        share_of(10, (0, 11))
    assert EvaluateConfig().map_parts == 1
