"""Extensions in a module outside the package run, with their options, and in every process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from tiny_engine import arithmetic_rows

from engine.cli.forms import PPO
from engine.cli.resolve import resolve_file
from engine.config import DataConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.data.sources import load_splits
from engine.errors import ConfigError
from engine.registry import Registry
from engine.trainers.rl import RLTrainer
from engine.trainers.run_plan import check_config

EXTENSIONS = "extensions_of_a_user"
pytestmark = pytest.mark.usefixtures("one_thread", "extensions")


@pytest.fixture(scope="module")
def extensions() -> Iterator[None]:
    """The extensions are registered while this file's tests run, and not in those of others."""
    importlib.import_module(EXTENSIONS)
    yield
    for module in [one for name, one in sys.modules.items() if name.startswith("engine.")]:
        for registry in [one for one in vars(module).values() if isinstance(one, Registry)]:
            entries = registry._entries
            for name in [n for n, e in entries.items() if e.target.__module__ == EXTENSIONS]:
                del entries[name]
    del sys.modules[EXTENSIONS]


BASE: dict[str, Any] = {
    "plugins": [EXTENSIONS],
    "rollout": {"n": 4},
    "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
    "trainer": {
        "total_training_steps": 1,
        "train_batch_size": 4,
        "placement": "local",
        "threads": 1,
    },
}


def settings(**sections: Any) -> RLConfig:
    values = {name: BASE.get(name, {}) | section for name, section in sections.items()}
    return RLConfig.model_validate(BASE | values)


def run(folder: Path, config: RLConfig, rows: pd.DataFrame | None = None) -> list[tuple[str, Any]]:
    """What the extensions were called with in the trainer's process."""
    calls: list[tuple[str, Any]] = sys.modules[EXTENSIONS].CALLS
    calls.clear()
    rows = pd.DataFrame(arithmetic_rows(8)) if rows is None else rows
    loader = PromptLoader(rows, 4, 0)
    with RLTrainer(folder, config, loader, max_response_length=6, max_model_len=40) as trainer:
        trainer.fit()
    return calls


ONE_OF_EACH = {
    "algorithm": {
        "adv_estimator": "best_of_batch",
        "options": {"scale": 0.3},
        "dataflow": "my_grpo",
        "dataflow_options": {"note": "mine"},
    },
    "actor": {"policy_loss": {"loss_mode": "tempered", "options": {"power": 2}}},
    "rollout": {"engine": "counting", "options": {"label": "first"}},
    "reward": {"name": "vowels", "options": {"letters": ["1", "2"]}, "isolation": "none"},
}
CALLED = [
    ("counting", "first"),
    ("my_grpo", "mine"),
    ("vowels", ("1", "2")),
    ("best_of_batch", 0.3),
    ("tempered", 2.0),
]


def test_one_of_each_runs_with_its_options_and_on_its_own_rows(tiny_folder: Path) -> None:
    source = DataConfig(source=f"{EXTENSIONS}:Sums", options={"rows": 5})
    rows = load_splits(source, 0).train
    assert len(rows) == 5
    calls = run(tiny_folder, settings(**ONE_OF_EACH), rows)
    assert list(dict.fromkeys(calls)) == CALLED


def test_a_preference_loss_of_ones_own(tiny_folder: Path) -> None:
    preference = {"loss": "squared", "options": {"target": "0.5"}}
    algorithm = {"dataflow": "online_dpo", "preference": preference}
    config = settings(algorithm=algorithm, actor={"use_kl_loss": False})
    assert ("squared", 0.5) in run(tiny_folder, config)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_options_come_from_files_and_the_command_line(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"run.{suffix}"
    write = yaml.safe_dump if suffix == "yaml" else json.dumps
    file.write_text(write({"rl": {**ONE_OF_EACH, "plugins": [EXTENSIONS]}}))
    typed = ["algorithm.options.scale=0.7", "actor.policy_loss.options.power=3"]
    config = resolve_file(PPO, file, typed).config.rl
    check_config(config)
    assert config.algorithm.options == {"scale": 0.7}
    assert config.actor.policy_loss.options == {"power": 3}
    assert config.reward.options == {"letters": ["1", "2"]}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"adv_estimator": "best_of_batch", "options": {"scal": 1}}},
            r"algorithm.options.scal: advantage estimator 'best_of_batch' doesn't read 'scal' "
            r"\(did you mean 'scale'\?\); remove it \(it reads scale\)",
        ),
        (
            {"algorithm": {"adv_estimator": "gae", "options": {"lam": 0.9}}},
            "algorithm.options.lam is a setting of its own; set algorithm.lam",
        ),
        (
            {"actor": {"policy_loss": {"loss_mode": "tempered", "options": {"power": "high"}}}},
            "actor.policy_loss.options.power='high': Input should be a valid number",
        ),
        (
            {"algorithm": {"dataflow": "my_grpo", "dataflow_options": {"notes": ""}}},
            "algorithm.dataflow_options.notes: dataflow 'my_grpo' doesn't read 'notes'",
        ),
        (
            {"reward": {"name": "vowels", "options": {"letter": "a"}, "isolation": "none"}},
            "reward.options.letter: reward 'vowels' doesn't read 'letter'",
        ),
        (
            {"rollout": {"engine": "counting", "options": {"lable": "a"}}},
            "rollout.options.lable: rollout engine 'counting' doesn't read 'lable'",
        ),
        (
            {"rollout": {"engine": "counting", "options": {"seed": 1}}},
            "rollout.options.seed is given by the run",
        ),
        (
            {"rollout": {"engine": "vllm", "options": {"bucket_mb": 1}}},
            "rollout.options has no effect with rollout.engine=vllm.* set rollout.vllm",
        ),
        (
            {"rollout": {"engine": "counting", "kv_cache_memory_mb": 32}},
            "rollout.kv_cache_memory_mb=32 has no effect with rollout.engine=counting",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(settings(**sections))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_plugins_are_imported_in_every_process(tiny_folder: Path) -> None:
    """Loss, engine and reward are looked up in three processes that know nothing but the names."""
    pools = [
        {"roles": ["actor"], "cpus": 0.5},
        {"roles": ["sampler"], "cpus": 0.5},
        {"roles": ["reward"], "cpus": 0.0},
    ]
    trainer = {"placement": "ray", "mode": "one_step_off", "pools": pools}
    sections = ONE_OF_EACH | {"trainer": BASE["trainer"] | trainer}
    sections["actor"] = ONE_OF_EACH["actor"] | {"use_kl_loss": False}
    calls = run(tiny_folder, settings(**sections))
    assert {name for name, _ in calls} == {"my_grpo", "best_of_batch"}  # in the controller
