"""Every role and every trainer computes on the device, and has its weights there; skipped without
one. Evaluation, the reward model and the endpoint have tests of their own."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows, random_completions
from torch import Tensor, nn

from engine import PreferenceTrainer, ProcessRewardTrainer, RewardModelTrainer, SFTTrainer
from engine.batch import Batch
from engine.config import (
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    RLConfig,
    SFTConfig,
)
from engine.controller.worker_host import RoleSpec
from engine.data.loader import PromptLoader
from engine.data.training_examples import LabelledExample, PairExample, StepExample
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import RequiredPasses
from engine.models import load_model
from engine.runtime import policy_runtime
from engine.runtime.policy_runtime import PolicyRuntime, StartModel
from engine.trainers.offline import SFTExample
from engine.trainers.rl import RLTrainer
from engine.trainers.run_spec import ROLES, RunSpec, rollout_worker_spec
from engine.workers.role import WorkerContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]
FOLDER = "the policy's own folder"
NO_KL = {"use_kl_loss": False}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # with the roles that they show
    "ppo": (
        "actor rollout reference critic reward",
        {"algorithm": {"adv_estimator": "gae"}, "actor": {"use_kl_loss": True}},
    ),
    "distillation": (
        "actor rollout teacher reward",
        {"algorithm": {"dataflow": "distillation", "teacher": FOLDER}, "actor": NO_KL},
    ),
    "several teachers": (
        "teacher",
        {
            "algorithm": {
                "dataflow": "distillation",
                "distillation": {
                    "loss": "jsd",
                    "top_k": 4,
                    "teachers": [{"model": FOLDER}, {"model": FOLDER, "weight": 2.0}],
                },
            },
            "actor": NO_KL,
        },
    ),
    "online_dpo": ("actor rollout reference reward", {"algorithm": {"dataflow": "online_dpo"}}),
    "episodes": (
        "actor rollout reference",
        {
            "rollout": {
                "n": 2,
                "multi_turn": {"enable": True, "max_turn_length": 6},
                "agent": {"environment": "digit_games:DigitGame", "num_workers": 0},
            },
            "reward": {"name": "environment"},
        },
    ),
}
SAMPLERS = {"sampler", "async sampler"}


class Places:
    """Kinds of devices that layers compute on, and that engines decode on."""

    def __init__(self) -> None:
        self.layers: set[str] = set()
        self.engines: set[str] = set()
        self._before = {id(module) for module in self._modules()}

    def layer(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        own = list(module.parameters(recurse=False))
        if own:
            self.layers |= {t.device.type for t in (*own, *args) if isinstance(t, Tensor)}

    def weights(self) -> set[str]:
        """Of all modules that were made meanwhile and are still there."""
        gc.collect()
        new = [module for module in self._modules() if id(module) not in self._before]
        return {p.device.type for module in new for p in module.parameters(recurse=False)}

    @staticmethod
    def _modules() -> list[nn.Module]:
        return [found for found in gc.get_objects() if isinstance(found, nn.Module)]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    found = Places()
    create = policy_runtime.create_engine

    def noted(name: str, model: nn.Module, **options: Any) -> Any:
        found.engines |= {t.device.type for t in (*model.parameters(), *model.buffers())}
        return create(name, model, **options)

    monkeypatch.setattr(policy_runtime, "create_engine", noted)
    hook = nn.modules.module.register_module_forward_pre_hook(found.layer)
    yield found
    hook.remove()


def rl_config(folder: Path, **sections: Any) -> RLConfig:
    values: dict[str, Any] = {
        "rollout": {"n": 2},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {"total_training_steps": 2, "train_batch_size": 4, "placement": "local"},
    }
    return RLConfig.model_validate_json(json.dumps(values | sections).replace(FOLDER, str(folder)))


@pytest.mark.parametrize("run", RUNS)
def test_the_roles_of_a_run(tiny_folder: Path, places: Places, run: str) -> None:
    roles, sections = RUNS[run]
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(8)), 4, 0)
    config = rl_config(tiny_folder, **sections)
    longest = (36, 60) if config.rollout.multi_turn.enable else (6, 40)
    sizes = dict(zip(("max_response_length", "max_model_len"), longest, strict=True))
    with RLTrainer(tiny_folder, config, loader, dtype="bfloat16", **sizes) as trainer:
        assert 0 < trainer.fit()["perf/max_memory_allocated_gb"] < 8
        assert set(roles.split()) <= {*trainer.roles}
        assert places.weights() == {"cuda"}
    assert places.layers == places.engines == {"cuda"}


@pytest.mark.parametrize("role", sorted(SAMPLERS))
def test_processes_that_only_decode(tiny_folder: Path, places: Places, role: str) -> None:
    """Built as a run builds them, with a policy of their own that gets new weights."""
    mode = "one_step_off" if role == "sampler" else "async"
    config = rl_config(tiny_folder, trainer={"mode": mode, "train_batch_size": 4})
    needs = RequiredPasses.of(config, choose_dataflow(config.algorithm))
    run = RunSpec(str(tiny_folder), config, needs, frozenset({role}), 6, 40, 3, "bfloat16")
    spec: RoleSpec = (
        ROLES.get("sampler")(run) if role == "sampler" else rollout_worker_spec(role, run)
    )
    worker: Any = spec.worker_class(WorkerContext(role), **spec.options)
    trained = PolicyRuntime(load_model(tiny_folder, "bfloat16"))
    trained.version = 1
    assert worker.load_weights(trained.pack_weights()) == 1
    prompts = Batch(
        {"group_ids": torch.arange(2)}, {"prompt_ids": [[5, 6, 7], [8, 9]], "answer": ["1", "2"]}
    )
    if role == "sampler":
        done = worker.generate(prompts)
    else:
        done = Batch.concat(list(worker.poll(prompts, 60.0).groups))
    assert len(done) == 4
    assert set(done["policy_version"].tolist()) == {1}
    assert places.engines == places.weights() == {"cuda"}
    worker.close()


def test_all_roles_are_here() -> None:
    shown = {role for roles, _ in RUNS.values() for role in roles.split()} | SAMPLERS
    assert set(ROLES.names()) <= shown, "a new role needs a run above"


def test_trainers_on_rows(tiny_folder: Path, places: Places) -> None:
    common = {"threads": 1, "train_batch_size": 4, "max_steps": 2}
    start = StartModel(str(tiny_folder), "bfloat16")
    prompts, chosen = random_completions(8, 0)
    _, rejected = random_completions(8, 1)
    pairs = [PairExample(*ids) for ids in zip(prompts, chosen, rejected, strict=True)]
    labels = [LabelledExample(p, chosen[i], i % 2 > 0) for i, p in enumerate(prompts)]
    steps = [StepExample(p, [5, 6, 7], [0, 2], [True, i % 2 > 0]) for i, p in enumerate(prompts)]
    rows = [SFTExample(*ids) for ids in zip(prompts, chosen, strict=True)]
    sft = SFTTrainer(start, 0, SFTConfig.model_validate(common), seed=0)
    preference = PreferenceTrainer(
        start, 0, PreferenceTrainingConfig.model_validate(common), seed=0
    )
    kto = PreferenceTrainingConfig.model_validate(common | {"loss": "kto"})
    unpaired = PreferenceTrainer(start, 0, kto, seed=0)
    reward = RewardModelTrainer(start, 0, RewardModelTrainingConfig.model_validate(common), seed=0)
    of_steps = RewardModelTrainingConfig.model_validate(common | {"head": "token"})
    process = ProcessRewardTrainer(start, 0, of_steps, seed=0)
    for trainer, examples in (
        (sft, rows),
        (preference, pairs),
        (unpaired, labels),
        (reward, pairs),
        (process, steps),
    ):
        with trainer:  # type: ignore[attr-defined]
            trainer.fit(examples, examples[:2])  # type: ignore[attr-defined]
            assert places.weights() == {"cuda"}, trainer
        assert places.layers == {"cuda"}, trainer
