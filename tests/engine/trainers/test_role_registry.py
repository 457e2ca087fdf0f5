"""A role from outside: one module that registers it, and a dataflow that calls it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from tiny_engine import arithmetic_rows

from engine.config import RLConfig
from engine.data.loader import PromptLoader
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import RequiredPasses
from engine.errors import ConfigError
from engine.trainers.rl import RLTrainer
from engine.trainers.run_spec import RunSpec, default_pools, role_specs

pytestmark = pytest.mark.usefixtures("one_thread")

JUDGED = '''
import torch

from engine.batch import Batch
from engine.controller.worker_host import RoleSpec
from engine.dataflows import register_dataflow
from engine.dataflows.algo import StepResult
from engine.dataflows.recipes import generate_and_score
from engine.trainers.run_spec import register_role
from engine.workers.role import Dispatch, dispatch
from engine.workers.role import StatefulWorker


class JudgeWorker(StatefulWorker):
    """Likes every second completion, by a strictness of its own, and counts what it has seen."""

    def __init__(self, context, *, strictness: float) -> None:
        super().__init__(context)
        self.strictness, self.rows = strictness, 0

    @dispatch(Dispatch.DATA_PARALLEL, writes=("verdict",))
    def judge(self, batch: Batch) -> Batch:
        self.rows += len(batch)
        return Batch({"verdict": self.strictness * (torch.arange(len(batch)) % 2)})

    @dispatch(Dispatch.RANK_ZERO)
    def seen(self) -> int:
        return self.rows

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state) -> None:
        self.rows = state["rows"]


@register_role("judge")
def judge(spec):
    return RoleSpec("judge", JudgeWorker, {"strictness": 0.5 * spec.config.rollout.n})


@register_dataflow("judged", roles={"actor", "rollout", "reward", "judge"}, uses_advantages=False)
def judged(roles, prompts, algo):
    batch = generate_and_score(roles, prompts, algo)
    batch |= roles["judge"].judge(batch)
    verdict = batch["verdict"]
    batch |= {"advantages": (verdict - verdict.mean())[:, None] * batch["response_mask"]}
    algo.metrics["judge/mean"] = float(verdict.mean())
    return StepResult(batch, [roles.actor.update(batch)])
'''


def test_a_role_from_outside_is_placed_called_and_saved(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judged_plugin.py").write_text(JUDGED)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RLConfig.model_validate(
        {
            "plugins": ["judged_plugin"],
            "algorithm": {"dataflow": "judged"},
            "actor": {"use_kl_loss": False, "optim": {"warmup_ratio": 0.0}},
            "rollout": {"n": 2},
            "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
            "trainer": {
                "total_training_steps": 1,
                "train_batch_size": 4,
                "placement": "local",
                "threads": 1,
            },
        }
    )

    def trainer() -> RLTrainer:
        loader = PromptLoader(pd.DataFrame(arithmetic_rows(8)), 4, 0)
        return RLTrainer(tiny_folder, config, loader, max_response_length=6, max_model_len=40)

    with trainer() as run:
        metrics = run.fit(checkpoint_dir=tmp_path / "checkpoints")
        assert run.roles["judge"].world_size == 1
    with trainer() as resumed:
        assert resumed.resume(tmp_path / "checkpoints") is not None
        assert resumed.roles["judge"].seen().result() == 8
    assert metrics["judge/mean"] == 0.5
    assert metrics["actor/grad_norm"] > 0
    needs = RequiredPasses.of(config, choose_dataflow(config.algorithm))
    spec = RunSpec("folder", config, needs, frozenset({"actor", "juge"}), 6, 40, seed=3)
    with pytest.raises(ConfigError, match=r"role='juge' is unknown \(did you mean 'judge'\?\)"):
        role_specs(spec)


def test_each_role_beside_the_policy_has_a_process_by_default() -> None:
    roles = {"reward", "judge", "actor", "sampler", "rollout"}
    assert default_pools(roles) == [("actor", "rollout"), ("judge",), ("reward",)]
