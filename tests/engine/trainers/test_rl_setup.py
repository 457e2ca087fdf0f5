"""The set-up of RL: roles, and the calls of a step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows, save_family, training_batch

from engine.batch import Batch, LazyBatch
from engine.config import ActorConfig, LoRAConfig, RLConfig
from engine.controller.placement import Pool
from engine.data.loader import PromptLoader
from engine.dataflows import choose_dataflow
from engine.dataflows.algo import Algo, RequiredPasses, StepResult
from engine.dataflows.recipes import DynamicSampling
from engine.errors import ConfigError
from engine.parallel.layout import Layout
from engine.trainers.layout_checks import check_layouts
from engine.trainers.rl import RLTrainer
from engine.trainers.rollout_modes import SignalFilter
from engine.trainers.run_plan import check_config
from engine.trainers.run_spec import (
    RolloutSource,
    RunSpec,
    broadcast_backend,
    call_layout,
    default_pools,
    effective_config,
    placement_of,
    register_rollout_source,
    resolve_placement,
    role_specs,
    rollout_worker_placement,
    rollout_worker_spec,
    run_roles,
)
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

ALL = frozenset({"actor", "rollout", "reference", "critic", "reward"})


def config(**changes: Any) -> RLConfig:
    return RLConfig.model_validate(changes)


def run_spec(settings: RLConfig, roles: frozenset[str] = ALL) -> RunSpec:
    settings = effective_config(settings)
    needs = RequiredPasses.of(settings, choose_dataflow(settings.algorithm))
    return RunSpec("folder", settings, needs, roles, 6, 40, seed=3)


def specs(settings: RLConfig, roles: frozenset[str] = ALL) -> dict[str, dict[str, Any]]:
    return {spec.name: spec.options for spec in role_specs(run_spec(settings, roles))}


def test_policy_roles_share_a_process_and_the_reward_sits_apart() -> None:
    placement = placement_of(run_spec(config(trainer={"threads": 2, "placement": "local"})))
    assert placement.kind == "local"
    policy = ("actor", "rollout", "reference", "critic")
    assert placement.pools == (Pool(policy, cpus=2.0), Pool(("reward",), cpus=0.0))
    without = placement_of(run_spec(config(trainer={"threads": 2}), ALL - {"critic"}))
    assert without.pools[0].roles == ("actor", "rollout", "reference")


VLLM = {"engine": "vllm"}


@pytest.mark.parametrize(
    ("asked", "gpus", "rollout", "trainer", "rank", "expected"),
    [
        ("auto", (1, 2), VLLM, {}, 0, "nccl"),
        ("auto", (0, 0), VLLM, {}, 0, None),
        ("auto", (0.5, 0.5), VLLM, {}, 0, None),
        ("auto", (1, 1), {}, {}, 0, None),
        ("auto", (1, 1), VLLM, {"delta_sync": True}, 0, None),
        ("auto", (1, 1), VLLM, {"mode": "one_step_off"}, 0, None),
        ("auto", (1, 1), VLLM | {"vllm": {"quantization": "fp8"}}, {}, 0, None),
        ("auto", (1, 1), VLLM, {}, 8, None),
        ("store", (1, 1), VLLM, {}, 0, None),
        ("gloo", (0, 0), VLLM, {}, 0, "gloo"),
        ("nccl", (1, 1), VLLM, {}, 0, "nccl"),
        ("nccl", (0, 1), VLLM, {}, 0, "nccl can't go with pools without whole GPUs"),
        ("gloo", (0, 0), {}, {}, 0, "gloo can't go with rollout.engine=native"),
        ("gloo", (0, 0), VLLM, {"delta_sync": True}, 0, "can't go with trainer.delta_sync"),
        ("gloo", (0, 0), VLLM, {"placement": "local"}, 0, "with trainer.placement=local"),
        ("gloo", (0, 0), VLLM, {}, 8, "can't go with model.lora.rank=8"),
    ],
)
def test_what_broadcasts_weights(
    asked: str,
    gpus: tuple[float, float],
    rollout: dict[str, Any],
    trainer: dict[str, Any],
    rank: int,
    expected: str | None,
) -> None:
    pools = [
        {"roles": ["actor"], "gpus": gpus[0]},
        {"roles": ["reward"], "cpus": 0},
        {"roles": ["sampler"], "gpus": gpus[1]},
    ]
    trainer = {"mode": "async", "pools": pools, "weight_transfer": asked} | trainer
    settings = config(rollout=rollout, trainer=trainer)
    spec = replace(run_spec(settings, frozenset({"actor", "reward"})), lora=LoRAConfig(rank=rank))
    if expected is None or " " not in expected:
        assert broadcast_backend(spec) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            broadcast_backend(spec)


def test_pools_by_configuration() -> None:
    pools = [
        {"roles": ["actor", "rollout"], "gpus": 1, "labels": {"zone": "a"}},
        {"roles": ["reference", "critic"], "cpus": 2, "resources": {"fast": 1.0}},
        {"roles": ["reward"], "cpus": 0},
    ]
    placed = placement_of(run_spec(config(trainer={"pools": pools}))).pools
    assert placed[0] == Pool(("actor", "rollout"), gpus=1.0, labels={"zone": "a"})
    assert placed[1] == Pool(("reference", "critic"), cpus=2.0, resources={"fast": 1.0})
    assert [pool.name for pool in placed] == ["actor+rollout", "reference+critic", "reward"]


def test_a_sampler_gets_its_share_of_the_cores() -> None:
    settings = config(trainer={"threads": 6, "mode": "one_step_off", "rollout_threads": 4})
    pools = placement_of(run_spec(settings, ALL | {"sampler"})).pools
    assert [(pool.name, pool.cpus) for pool in pools[1:]] == [("reward", 0.0), ("sampler", 4.0)]
    assert pools[0].cpus == 2.0
    many = config(trainer={"threads": 7, "mode": "async", "rollout_workers": 2})
    assert placement_of(run_spec(many)).pools[0].cpus == 1.0  # two samplers with three each
    assert rollout_worker_placement("sampler1", run_spec(many)).pools == (
        Pool(("sampler1",), cpus=3.0),
    )
    assert rollout_worker_spec("sampler1", run_spec(many)).name == "sampler1"


def test_samplers_take_what_their_pool_says() -> None:
    pools = [
        {"roles": ["actor", "rollout", "reference", "critic"], "gpus": 1},
        {"roles": ["reward"], "cpus": 0},
        {"roles": ["sampler"], "cpus": 4, "gpus": 2, "labels": {"zone": "b"}},
    ]
    trainer = {"rollout_workers": 3, "pools": pools}
    ahead = run_spec(config(trainer=trainer | {"mode": "one_step_off"}), ALL | {"sampler"})
    sampler = Pool(("sampler",), world_size=3, cpus=4.0, gpus=2.0, labels={"zone": "b"})
    assert placement_of(ahead).pools[-1] == sampler
    assert call_layout("sampler", ahead.config) == Layout(dp=3)
    each = run_spec(config(trainer=trainer | {"mode": "async"}))
    assert [pool.name for pool in placement_of(each).pools][1:] == ["reward"]
    assert rollout_worker_placement("sampler2", each).pools == (
        replace(sampler, roles=("sampler2",), world_size=1),
    )
    plain = run_spec(
        config(trainer={"mode": "one_step_off", "rollout_workers": 2, "threads": 8}),
        ALL | {"sampler"},
    )
    assert placement_of(plain).pools[-1] == Pool(("sampler",), world_size=2, cpus=4.0)


APART = [{"roles": ["actor", "rollout", "reference"], "gpus": 1}, {"roles": ["reward"]}]


OWN = {"engine": "vllm", "tensor_parallel_size": 2, "vllm": {"in_process": False}}


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
@pytest.mark.parametrize(
    ("trainer", "rollout", "message"),
    [
        ({}, {"tensor_parallel_size": 2}, "a sampler is one process.*rollout.vllm.in_process"),
        ({}, {"engine": "vllm", "tensor_parallel_size": 2}, "a sampler is one process"),
        ({"rollout_workers": 129}, {}, "more than the prompts of a step"),
        (
            {"rollout_workers": 2},
            {"engine": "server", "server": {"urls": ["http://a", "http://b"]}},
            "one process speaks to all servers",
        ),
        ({"pools": [*APART, {"roles": ["sampler"]}]}, {}, "would decode on the CPU"),
        ({"pools": [*APART, {"roles": ["sampler"], "gpus": 1}]}, OWN, "set gpus of the pool"),
    ],
)
def test_samplers_that_can_t_be_are_refused(
    mode: str, trainer: dict[str, Any], rollout: dict[str, Any], message: str
) -> None:
    settings = config(trainer=trainer | {"mode": mode}, rollout=rollout)
    with pytest.raises(ConfigError, match=message):
        check_layouts(settings, LoRAConfig())
    check_layouts(config(trainer={"mode": mode, "rollout_workers": 2}, rollout=OWN), LoRAConfig())
    fitting = [*APART, {"roles": ["sampler"], "gpus": 2}]
    check_layouts(config(trainer={"mode": mode, "pools": fitting}, rollout=OWN), LoRAConfig())


@pytest.mark.parametrize(("mode", "sampler"), [("one_step_off", {"sampler"}), ("async", set())])
def test_beside_samplers_the_trainer_has_no_rollout(mode: str, sampler: set[str]) -> None:
    settings = config(trainer={"mode": mode}, rollout={"engine": "vllm"})
    _, roles = run_roles(settings)
    assert roles == {"actor", "reference", "reward"} | sampler
    assert default_pools(roles)[0] == ("actor", "reference")
    both = config(trainer={"mode": mode, "pools": [{"roles": ["actor", "rollout"]}]})
    with pytest.raises(ConfigError, match=f"this run has .*mode={mode}: no rollout"):
        check_config(both)


def validations(trainer: RLTrainer) -> list[object]:
    """Metrics and tokens of six rows, then of one."""
    found: list[object] = []

    def note(split: str, step: int, batch: Batch) -> None:
        found.append(
            [r[m.bool()].tolist() for r, m in zip(*map(batch.__getitem__, SAMPLED), strict=True)]
        )

    trainer.on_rollouts = note
    return [*(trainer.validate(arithmetic_rows(n)) for n in (6, 1)), *found]


SAMPLED = ("responses", "response_mask")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["one_step_off", "async"])
@pytest.mark.parametrize("sampled", [False, True])
def test_samplers_validate_as_the_trainer_does(
    tiny_folder: Path, tmp_path: Path, mode: str, sampled: bool
) -> None:
    """Before, between and after steps, with the weights of that step, whatever is in flight."""
    drawn = {"val_kwargs": {"do_sample": True, "n": 2, "temperature": 0.7}} if sampled else {}
    rollout = {"n": 4, **drawn}
    scored: dict[str, Any] = {
        "rollout": rollout,
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "actor": {"optim": {"lr": 1e-2, "warmup_ratio": 0.0}},
    }
    with trainer(tiny_folder, "sync", steps=1, **scored) as own:
        expected = validations(own)
    with trainer(tiny_folder, mode, steps=3, **scored) as ahead:
        assert validations(ahead) == expected
        ahead.validation = arithmetic_rows(5)
        ahead.config = ahead.config.replaced({"trainer.test_freq": 1})
        ahead.fit()
        between = [row["validation/reward"] for row in ahead.history]
        after = ahead.validate(ahead.validation)["validation/reward"]
        ahead.save(tmp_path)
    assert len(between) == 3
    assert after == between[-1]
    if not sampled:  # draws depend on the version, too
        with trainer(tmp_path, "sync", steps=1, **scored) as own:
            assert own.validate(arithmetic_rows(5))["validation/reward"] == after


def test_rollout_that_runs_ahead_is_corrected_unless_told_how() -> None:
    assert effective_config(config()) == config()
    ahead = effective_config(config(trainer={"mode": "async"})).algorithm.rollout_correction
    assert ahead.rollout_is == "token"
    assert ahead.rollout_is_threshold == 2.0
    own = {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}}
    given = config(trainer={"mode": "async"}, algorithm=own)
    assert effective_config(given) == given


def test_only_the_dataflow_s_roles_are_built() -> None:
    assert set(specs(config(), ALL - {"critic"})) == ALL - {"critic"}


@pytest.mark.parametrize(("mini", "epochs"), [(0, 1), (10, 1), (7, 3)])
def test_the_schedule_ends_with_the_last_optimizer_step(
    tmp_path: Any, mini: int, epochs: int
) -> None:
    settings = config(
        actor={"ppo_mini_batch_size": mini, "ppo_epochs": epochs, "use_kl_loss": False},
        rollout={"n": 4},
        trainer={"train_batch_size": 5, "total_training_steps": 2},
    )
    planned = specs(settings)["actor"]["total_steps"]
    worker = ActorWorker(
        WorkerContext("actor"),
        model_path=str(save_family("qwen2", tmp_path)),
        config=ActorConfig.model_validate(settings.actor.model_dump()),
        temperature=1.0,
        total_steps=planned,
        seed=0,
    )
    for _ in range(settings.trainer.total_training_steps):
        worker.update(training_batch(20))
    assert worker.train_state.optimizer._schedule.last_epoch == planned


@pytest.mark.parametrize(("mini", "epochs", "steps"), [(0, 1, 1), (4, 1, 3), (8, 2, 4), (20, 1, 1)])
def test_pairs_of_a_step_are_fewer_than_its_completions(mini: int, epochs: int, steps: int) -> None:
    settings = config(
        algorithm={"dataflow": "online_dpo"},
        actor={"ppo_mini_batch_size": mini, "ppo_epochs": epochs},
        rollout={"n": 4},
        trainer={"train_batch_size": 5, "total_training_steps": 2},
    )
    check_config(settings)
    assert specs(settings)["actor"]["total_steps"] == 2 * steps


def test_one_process_is_enough_for_a_run_with_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(**changes: Any) -> str:
        return resolve_placement(config(**changes)).trainer.placement

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert chosen() == chosen(algorithm={"adv_estimator": "gae"}) == "local"
    assert config(trainer={"placement": "auto"}) == resolve_placement(
        config(trainer={"placement": "auto"})
    )
    needs_ray: list[dict[str, Any]] = [
        {"trainer": {"placement": "ray"}},
        {"trainer": {"mode": "one_step_off"}},
        {"trainer": {"mode": "async"}},
        {"trainer": {"pools": [{"roles": ["actor", "rollout", "reference", "reward"]}]}},
        {"actor": {"parallel": {"fsdp": 2}}},
        {"critic": {"parallel": {"dp": 2}}},
        {"rollout": {"engine": "vllm"}},
        {"rollout": {"engine": "vllm", "vllm": {"in_process": False}}},
    ]
    for changes in needs_ray:
        assert chosen(**changes) == "ray", changes
    with monkeypatch.context() as told:
        told.setenv("RAY_ADDRESS", "head:6379")
        assert chosen() == "ray"
        assert chosen(trainer={"placement": "local"}) == "local"
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert chosen() == "ray"


def trainer(folder: Path, mode: str, steps: int, **sections: Any) -> RLTrainer:
    base: dict[str, Any] = {
        "rollout": {"n": 2},
        "trainer": {
            "mode": mode,
            "total_training_steps": steps,
            "train_batch_size": 4,
            "placement": "local",
            "threads": 2,
            "step_timeout_s": 60.0,
        },
    }
    for name, content in sections.items():
        base[name] = base.get(name, {}) | content
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
    config = RLConfig.model_validate(base)
    return RLTrainer(folder, config, loader, max_response_length=6, max_model_len=40)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_steps_without_a_pair_stop_nobody_and_age_nothing(tiny_folder: Path, mode: str) -> None:
    sections = {
        "algorithm": {"dataflow": "online_dpo"},
        "reward": {"name": "tiny_engine:always_one", "isolation": "none"},
        "trainer": {"delta_sync": mode != "sync"},
    }
    with trainer(tiny_folder, mode, steps=5, **sections) as run:
        run.fit()
        assert [row["preference/pairs"] for row in run.history] == [0.0] * 5
        behind = [row["staleness/max"] for row in run.history]
    assert max(behind) <= (0 if mode == "sync" else 1)


@pytest.mark.usefixtures("one_thread")
def test_a_refill_beside_a_sampler_is_of_the_prompts_that_it_asked_for(tiny_folder: Path) -> None:
    asked: list[list[str]] = []
    learned: list[Batch] = []
    sections = {
        "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 3}},
        "reward": {"name": "tiny_engine:sometimes_right", "isolation": "none"},
    }
    with trainer(tiny_folder, "one_step_off", steps=2, **sections) as run:
        step, more = run.dataflow.step, run.algo.more_prompts
        assert more is not None

        def noting(prompts: Batch) -> Batch:
            asked[-1] += [row[0]["content"] for row in prompts.columns["prompt"]]
            return prompts

        def watched(roles: Any, prompts: Batch, algo: Algo) -> StepResult:
            asked.append([])
            noting(prompts)
            result: StepResult = step(roles, prompts, algo)
            learned.append(result.batch.resolve())
            return result

        run.algo.more_prompts = lambda: noting(more())
        run.dataflow = replace(run.dataflow, step=watched)
        run.fit()
        assert [row["sampling/rollouts"] for row in run.history] == [3.0, 3.0]
    for mine, batch in zip(asked, learned, strict=True):
        assert len(mine) == 12
        for group, prompt in zip(batch["group_ids"], batch.columns["prompt"], strict=True):
            assert prompt[0]["content"] == mine[int(group)]
    # The sampler gives the refills, too: after the last step's own, whose weights it has.
    assert set(learned[-1]["policy_version"].tolist()) == {0}


@pytest.mark.usefixtures("one_thread")
def test_a_baseline_in_async_has_completions_and_scores_of_its_own(tiny_folder: Path) -> None:
    sections = {
        "algorithm": {"adv_estimator": "remax"},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
    }
    with trainer(tiny_folder, "async", steps=2, **sections) as run:
        metrics = run.fit()
    assert metrics["actor/grad_norm"] > 0


@register_rollout_source("every_batch_twice")
class EveryBatchTwice(RolloutSource):
    """A source from outside the engine, as a user's plugin has it."""

    off_policy = True
    _batch: Batch | None = None

    def next_prompts(self) -> Batch:
        batch, self._batch = self._batch, None
        if batch is None:
            batch = self._batch = self.prompts.next_batch()
        return batch


@pytest.mark.usefixtures("one_thread")
def test_a_mode_of_ones_own_is_one_class(tiny_folder: Path) -> None:
    asked: list[list[str]] = []
    with trainer(tiny_folder, "every_batch_twice", steps=4) as run:
        step = run.dataflow.step

        def watched(roles: Any, prompts: Batch, algo: Algo) -> StepResult:
            asked.append([row[0]["content"] for row in prompts.columns["prompt"]])
            return step(roles, prompts, algo)

        run.dataflow = replace(run.dataflow, step=watched)
        metrics = run.fit()
    assert asked[0] == asked[1] != asked[2] == asked[3]
    assert "rollout_corr/rollout_is_mean" in metrics, "off-policy completions are weighted"


@pytest.mark.usefixtures("one_thread")
def test_an_unknown_mode_is_refused_with_those_that_there_are(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.mode='asink' is unknown.*async, .*sync"):
        trainer(tiny_folder, "asink", steps=1)


def keeps(metric: str, scores: list[float], lengths: list[int], failed: list[bool]) -> bool:
    """Whether asynchronous rollout keeps a group; the sync mode must decide the same."""
    config = RLConfig.model_validate(
        {
            "algorithm": {"filter_groups": {"enable": True, "metric": metric}},
            "reward": {"overlong_buffer": {"enable": True, "len": 4}},
            "trainer": {"mode": "async"},
        }
    )
    needs = RequiredPasses.of(config, choose_dataflow(config.algorithm))
    algo = Algo(config, needs, max_response_length=8)
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).float()
    on_last = torch.zeros_like(mask)
    on_last[torch.arange(len(scores)), torch.tensor(lengths) - 1] = torch.tensor(scores)
    group = Batch(
        {
            "group_ids": torch.zeros(len(scores), dtype=torch.long),
            "response_mask": mask,
            "token_level_scores": on_last,
            "reward_failed": torch.tensor(failed),
        }
    )
    kept = SignalFilter(algo).accepts(group)
    assert algo.metrics == {}
    sampling = DynamicSampling(algo, wanted=1)
    sampling.add(LazyBatch(group))
    sampling.batch()
    assert kept == (algo.metrics["sampling/groups_kept"] == 1)
    return kept


@pytest.mark.usefixtures("one_thread")
def test_async_keeps_the_groups_that_sync_keeps() -> None:
    well, one_failed = [False] * 3, [False, False, True]
    assert keeps("score", [0.0, 1.0, 1.0], [3, 3, 3], well)
    assert not keeps("score", [1.0, 1.0, 0.0], [3, 3, 3], one_failed)
    assert not keeps("score", [1.0, 1.0, 1.0], [3, 3, 8], well)
    assert keeps("reward", [1.0, 1.0, 1.0], [3, 3, 8], well)


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


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_each_role_beside_the_policy_has_a_process_by_default() -> None:
    roles = {"reward", "judge", "actor", "sampler", "rollout"}
    assert default_pools(roles) == [("actor", "rollout"), ("judge",), ("reward",)]
