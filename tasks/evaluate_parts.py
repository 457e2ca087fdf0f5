"""Evaluation on several machines that need not start together: a map task over shares of problems.

With `evaluate.map_parts` the dynamic task `evaluate` runs `evaluate_part` so many times, each in a
pod of the profile, and `evaluate` reads their tables instead of decoding. Both models answer the
same share, so the tables are those of one machine, to the bit where its arithmetic is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekit import StructuredDataset, map_task
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, EvaluateConfig
from tasks.context import LARGE, RunContext, echo, local_artifact, user_facing_errors
from tasks.profiles import Profile
from tasks.ray_cluster import LOCAL_OBJECT_STORE_BYTES
from tasks.stage import stage_cache
from tasks.tables import EvaluationRows, TableFile, as_table, open_table
from tasks.variants import stages_of

if TYPE_CHECKING:
    import pandas as pd

    from engine.console import Progress


@stages_of(
    cache=stage_cache(),
    requests=LARGE,
    retries=3,
    interruptible=True,
    timeout=timedelta(hours=6),
)
def evaluate_part(
    part: int,
    run: RunContext,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    policy: FlyteDirectory,
    data: DataConfig,
    config: EvaluateConfig,
    seed: int,
) -> EvaluationRows:
    """Both models' rows of one share of the problems, `part` of `config.map_parts`."""
    import pandas as pd

    from engine.controller.ray_session import ray_session
    from engine.evaluation.layout import uses_ranks
    from engine.evaluation.sets import read_problems

    share = (part, config.map_parts)
    ray = ray_session("ray" if uses_ranks(config) else "local", LOCAL_OBJECT_STORE_BYTES)
    with user_facing_errors(), ray:
        echo(f"evaluation: part {part + 1} of {config.map_parts} starts")
        models = {"warm_start": local_artifact(warm_start), "rl": local_artifact(policy)}
        problems = read_problems(local_artifact(dataset))
        rows = answer_problems(models, problems, data, config, seed, share)
        return as_table(TableFile.write(pd.concat(list(rows.values()), ignore_index=True)))


def parts_of(profile: Profile, inputs: Mapping[str, Any]) -> Any:
    """The parts' tables, by a map task; None without parts. For `on_profiles(made_inside=…)`."""
    parts = inputs["config"].map_parts
    if parts == 1:
        return None
    return map_task(partial(evaluate_part(profile), **inputs))(part=list(range(parts)))


def joined(parts: Sequence[StructuredDataset], models: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The tables of all problems, by model, from those of the parts in order."""
    import pandas as pd

    from engine.data.contract import EVALUATION_ROWS

    read = [
        open_table(table).read(EVALUATION_ROWS, f"part {number + 1} of the evaluation")
        for number, table in enumerate(parts)
    ]
    rows = pd.concat(read, ignore_index=True)
    return {name: rows[rows["model"] == name].reset_index(drop=True) for name in models}


def answer_problems(
    models: Mapping[str, Path],
    problems: Mapping[str, pd.DataFrame],
    data: DataConfig,
    config: EvaluateConfig,
    seed: int,
    part: tuple[int, int] = (0, 1),
) -> dict[str, pd.DataFrame]:
    """Each model's rows, with a progress bar."""
    from engine.console import progress
    from engine.evaluation.evaluate import evaluate_model, share_of

    share = share_of(sum(map(len, problems.values())), part)
    each = (share.stop - share.start) * (1 + config.samples)
    rows: dict[str, pd.DataFrame] = {}
    bar: Progress[None] = progress(len(models) * each, "evaluate", "answer")
    with bar:
        for name, folder in models.items():
            rows[name] = evaluate_model(
                folder,
                problems,
                name,  # type: ignore[arg-type]
                config,
                max_response_length=data.max_response_length,
                max_prompt_length=data.max_prompt_length,
                seed=seed,
                part=part,
                on_progress=update_progress(bar, len(rows) * each),
            )
    return rows


def update_progress(bar: Progress[None], offset: int) -> Callable[[int], None]:
    """A callback that sets the bar to `offset` plus the finished completions of one model."""
    return lambda done: bar.update(offset + done - bar.count)
