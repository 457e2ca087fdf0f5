"""Reward functions from files: ours, verl's, and those that can't be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cli.reward_file import reward_name
from engine.errors import ConfigError
from engine.rewards import RewardThreads, resolve_reward, score

VERLS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth) + extra_info["bonus"], "acc": 1}

async def later(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)

def ours(prompts, completions, *, ground_truth, **columns):
    return [float(p in c) for p, c in zip(prompts, completions)]

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(VERLS)
    return path


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("compute_score", [[1.5], [0.25]]),
        ("later", [[1.0], [2.0]]),
        ("ours", [[0.0], [1.0]]),
    ],
)
def test_each_kind_scores_through_the_reward_runner(
    file: Path, name: str, rows: list[list[float]]
) -> None:
    columns = {
        "ground_truth": ["7", "7"],
        "data_source": ["x", "x"],
        "extra_info": [{"bonus": 0.5}, {"bonus": 0.25}],
    }
    function = resolve_reward(reward_name(str(file), name))
    scores = score(RewardThreads(function), ["6", "8"], ["7", "88"], columns, 20.0)
    assert scores.failures == {}
    assert [list(row) for row in scores.rows] == rows


def test_a_relative_path_is_found_where_ray_puts_a_jobs_files(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    assert callable(resolve_reward(reward_name("my_rewards.py", "ours")))


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (None, "f", "does not exist here"),
        ("import nothing_of_this_name", "f", "can't be loaded"),
        ("x = 1", "f", "has no function 'f'"),
        ("f = 1", "f", "has no function 'f'"),
    ],
)
def test_what_can_t_be_loaded_is_a_sentence(
    tmp_path: Path, content: str | None, name: str, words: str
) -> None:
    path = tmp_path / "broken.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        resolve_reward(reward_name(str(path), name))
