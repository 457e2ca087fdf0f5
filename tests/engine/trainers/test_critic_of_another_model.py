"""PPO whose critic starts from another model than the policy: `critic.model_path`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_engine import TINY_MODEL, arithmetic_rows, write_tiny_folder

from engine.config import LoRAConfig, ModelConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError
from engine.models import load_model
from engine.trainers.auto_placement import workload
from engine.trainers.layout_checks import check_layouts
from engine.trainers.rl import RLTrainer

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 3}


def settings(critic: Path | str, **sections: Any) -> RLConfig:
    values: dict[str, Any] = {
        "algorithm": {"adv_estimator": "gae"},
        "critic": {"model_path": str(critic), "optim": {"lr": 5e-3, "warmup_ratio": 0.0}},
        "rollout": {"n": 2},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {"total_training_steps": 2, "train_batch_size": 4, "placement": "local"},
    }
    for section, content in sections.items():
        values[section] = values.get(section, {}) | content
    return RLConfig.model_validate(values)


def trainer(folder: Path, config: RLConfig) -> RLTrainer:
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, seed=0)
    return RLTrainer(folder, config, loader, max_response_length=6, max_model_len=40)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model of the tiny one's tokens."""
    shape = ModelConfig.model_validate(TINY_MODEL.model_dump() | WIDE | {"num_key_value_heads": 1})
    return write_tiny_folder(tmp_path_factory.mktemp("wide") / "model", shape)


def test_the_critic_is_the_other_model_s(tiny_folder: Path, wide: Path, tmp_path: Path) -> None:
    with trainer(tiny_folder, settings(wide)) as subject:
        subject.fit(checkpoint_dir=tmp_path / "run")
        assert all(row["critic/grad_norm"] > 0 for row in subject.history)
        subject.save(tmp_path / "policy")
    assert load_model(tmp_path / "policy").config.hidden_size == TINY_MODEL.hidden_size
    stored = list((tmp_path / "run").rglob("critic*"))
    assert stored, sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with trainer(tiny_folder, settings(wide)) as again:
        again.load_checkpoint(tmp_path / "run" / "step_2")
    work = workload(
        settings(wide),
        model_path=str(tiny_folder),
        lora=LoRAConfig(),
        dtype="float32",
        max_response_length=6,
        max_model_len=40,
    )
    assert work.critic_shape is not None
    assert (work.critic_shape.hidden, work.shape.hidden) == (48, TINY_MODEL.hidden_size)


def test_a_critic_that_can_t_read_the_policy_is_refused(
    tiny_folder: Path, wide: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"critic.model_path=.* has no effect"):
        trainer(tiny_folder, settings(wide, algorithm={"adv_estimator": "grpo"}))
    other = shutil.copytree(wide, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|', '"<!', 1))
    with pytest.raises(ConfigError, match=r"critic.model_path=.* has another vocabulary"):
        trainer(tiny_folder, settings(other))
    short = shutil.copytree(wide, tmp_path / "short")
    model: Any = load_model(short)
    model.config.max_position_embeddings = 32
    model.config.save_pretrained(short)
    with pytest.raises(ConfigError, match=r"reads 32 tokens, and prompt and completion have up"):
        trainer(tiny_folder, settings(short))


def test_its_layout_is_checked_with_its_own_shape(tiny_folder: Path, wide: Path) -> None:
    policy: Any = load_model(tiny_folder).config
    layouts = {"actor": {"parallel": {"tp": 2}}, "trainer": {"placement": "ray"}}
    check_layouts(settings(tiny_folder, **layouts), LoRAConfig(), policy)
    with pytest.raises(ConfigError, match="3"):  # heads
        check_layouts(settings(wide, **layouts), LoRAConfig(), policy)


def test_a_critic_of_the_policy_s_own_model_is_as_without_a_path(tiny_folder: Path) -> None:
    found = []
    for path in ("", tiny_folder):
        with trainer(tiny_folder, settings(path)) as subject:
            subject.fit()
            found.append([row["critic/grad_norm"] for row in subject.history])
    assert found[0] == found[1]
