"""Checks before a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from engine.batch import Batch
from engine.config import RLConfig
from engine.dataflows.algo import teacher_weights
from engine.errors import ConfigError, DataError, EngineError
from engine.trainers.run_plan import check_config

CORRECTION = {"rollout_correction": {"rollout_is": "token"}}


GDPO = {"adv_estimator": "gdpo"}


APART = {"roles": ["rollout"]}


PAIRS: dict[str, Any] = {"dataflow": "online_dpo"}


AHEAD = {"mode": "one_step_off"}


PARTS = {"name": "answer_and_format"}


RS = {"rollout_rs_threshold": "0.5_2.0", "rollout_is_threshold": 3.0}


SERVER: dict[str, Any] = {"engine": "server", "server": {"url": "http://127.0.0.1:8000"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"n": 1}}, r"rollout.n=1 with algorithm.adv_estimator=grpo.*2 or more"),
        (
            {"algorithm": {"dataflow": "online_dpo"}, "rollout": {"n": 1}},
            r"rollout.n=1 with algorithm.dataflow=online_dpo.*2 or more",
        ),
        (
            {"algorithm": {"dataflow": "online_dpo"}, "actor": {"ppo_mini_batch_size": 1}},
            r"ppo_mini_batch_size=1 with algorithm.dataflow=online_dpo.*pairs.*an even number",
        ),
        ({"algorithm": {"adv_estimator": "grp"}}, "algorithm.adv_estimator='grp' is unknown"),
        ({"algorithm": {"adv_estimator": "remax", "dataflow": "grpo"}}, "one greedy rollout"),
        ({"algorithm": {"kl_penalty": "k9"}}, "KL estimator 'k9' is unknown"),
        ({"actor": {"kl_loss_type": "k9"}}, "KL estimator 'k9' is unknown"),
        ({"rollout": {"engine": "turbo"}}, "rollout.engine='turbo' is unknown"),
        ({"reward": {"name": "praise"}}, "reward.name='praise' is unknown"),
        ({"trainer": {"threads": (os.cpu_count() or 1) * 4 + 1}}, "trainer.threads="),
        ({"plugins": ["no_such_module"]}, "plugins: module 'no_such_module' can't be imported"),
        ({"actor": {"policy_loss": {"loss_mode": "gpg"}, "clip_ratio": 0.1}}, "no effect"),
        (
            {"actor": {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "token-mean"}},
            "the method is defined with",
        ),
        (
            {"actor": {"old_log_probs": "rollout"}, "algorithm": CORRECTION},
            "actor.old_log_probs=rollout with algorithm.rollout_correction",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_rs": "token_k4"}}},
            "is not a criterion",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_rs_threshold": 2.0}}},
            "no effect without rollout_rs",
        ),
        ({"algorithm": GDPO}, "reward.name=answer_match has none"),
        ({"reward": {"weights": {"format": 2.0}}}, "reward.weights names .*format"),
        ({"reward": PARTS | {"weights": {"form": 2.0}}}, r"names \['form'\]"),
        ({"reward": {"clip": [1.0, 0.0]}}, "reward.clip=.* is empty"),
        ({"algorithm": {"dataflow": "distillation"}}, "set algorithm.teacher to a model folder"),
        (
            {"algorithm": {"dataflow": "distillation", "teacher": "/nowhere"}},
            "actor.use_kl_loss with algorithm.dataflow=distillation",
        ),
        (
            {
                "algorithm": {"dataflow": "distillation", "teacher": "/nowhere"},
                "actor": {"use_kl_loss": False},
            },
            "algorithm.teacher='/nowhere' does not exist",
        ),
        (
            {
                "trainer": {"mode": "async"},
                "rollout": {
                    "engine": "server",
                    "server": {"url": "http://a", "weights": "none", "allow_fixed_policy": True},
                },
            },
            "trainer.mode=async with rollout.server.weights=none",
        ),
        ({"trainer": {"rollout_workers": 2}}, "trainer.rollout_workers=2 has no effect"),
        (
            {
                "trainer": {
                    "mode": "async",
                    "pools": [{"roles": ["actor", "rollout", "reference", "reward", "sampler"]}],
                }
            },
            "puts sampler into one pool with .*give it a pool of its own",
        ),
        ({"trainer": {"mode": "async"}, "rollout": {"parts": 2}}, "rollout.parts=2 needs"),
        (
            {"trainer": {"mode": "async"}, "actor": {"old_log_probs": "rollout"}},
            "actor.old_log_probs=rollout with trainer.mode=async",
        ),
        (
            {"trainer": {"pools": [{"roles": ["actor", "rollout"]}]}},
            r"trainer.pools places \['actor', 'rollout'\], but this run has",
        ),
        (
            {"trainer": {"pools": [{"roles": ["actor", "reference", "reward"]}, APART]}},
            "puts rollout apart from actor",
        ),
        ({"trainer": {"staleness": 2}}, "trainer.staleness=2 has no effect"),
        ({"trainer": {"rollout_threads": 2}}, "trainer.rollout_threads=2 has no effect"),
        (
            {"trainer": {"log_rollouts_freq": 0, "log_rollouts_rows": 8}},
            "trainer.log_rollouts_rows=8 has no effect with trainer.log_rollouts_freq=0",
        ),
        # settings without effect
        ({"algorithm": {"teacher": "/some"}}, "algorithm.teacher=/some has no effect"),
        (
            {"actor": {"use_kl_loss": False, "kl_loss_coef": 0.1}},
            "actor.kl_loss_coef=0.1 has no effect without actor.use_kl_loss",
        ),
        (
            {"algorithm": {"kl_penalty": "k3"}},
            "algorithm.kl_penalty=k3 has no effect without algorithm.use_kl_in_reward",
        ),
        ({"algorithm": {"kl_ctrl": {"kl_coef": 0.5}}}, "algorithm.kl_ctrl has no effect"),
        (
            {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"horizon": 5}}},
            "algorithm.kl_ctrl.horizon=5 has no effect with algorithm.kl_ctrl.type=fixed",
        ),
        ({"critic": {"ppo_epochs": 3}}, "critic.ppo_epochs=3 has no effect.* no critic"),
        (
            {"algorithm": {"preference": {"beta": 0.5}}},
            "algorithm.preference.beta=0.5 has no effect",
        ),
        (
            {"algorithm": {"filter_groups": {"max_num_gen_batches": 3}}},
            "filter_groups.max_num_gen_batches=3 has no effect",
        ),
        (
            {"algorithm": {"filter_groups": {"enable": True}, "dataflow": "grpo"}},
            "filter_groups.enable has no effect with dataflow grpo; use dapo",
        ),
        (
            {"reward": {"overlong_buffer": {"penalty_factor": 3.0}}},
            "overlong_buffer.penalty_factor=3.0 has no effect",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_is_threshold": 3.0}}},
            "rollout_is_threshold=3.0 has no effect",
        ),
        (
            {"algorithm": GDPO, "reward": PARTS | {"whiten": True}},
            "reward.whiten=True has no effect with adv_estimator=gdpo",
        ),
        (
            {"algorithm": GDPO | {"use_kl_in_reward": True}, "reward": PARTS},
            "use_kl_in_reward=True has no effect with adv_estimator=gdpo",
        ),
        (
            {"algorithm": GDPO, "reward": PARTS | {"weights": {"format": 0.5}}},
            "gdpo_reward_weights",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_rs": "token_k1", **RS}}},
            "rollout_is_threshold=3.0 has no effect without rollout_is;",
        ),
        ({"rollout": {"vllm": {"sleep": 1}}}, "rollout.vllm.sleep=1 .*rollout.engine=native"),
        ({"trainer": {"weight_transfer": "gloo"}}, "weight_transfer=gloo .*trainer.mode=sync"),
        ({"rollout": SERVER | {"vllm": {"sleep": 1}}}, "rollout.vllm.sleep=1 .*engine=server"),
        (
            {
                "rollout": {
                    "engine": "server",
                    "server": {"url": "http://a"},
                    "kv_cache_memory_mb": 999,
                }
            },
            "kv_cache_memory_mb=999 .*engine=server",
        ),
        *(
            ({"algorithm": PAIRS, "actor": {name: value}}, f"actor.{name}={value} .*one of pairs")
            for name, value in {
                "clip_ratio": 0.3,
                "entropy_coeff": 0.01,
                "loss_agg_mode": "seq-mean-token-sum",
                "old_log_probs": "trainer",
                "kl_loss_coef": 0.1,
                "kl_loss_type": "k1",
            }.items()
        ),
        (
            {"algorithm": PAIRS, "actor": {"policy_loss": {"loss_mode": "gspo"}}},
            "actor.policy_loss.loss_mode=gspo .*one of pairs",
        ),
        (
            {"algorithm": PAIRS | {"adv_estimator": "rloo"}},
            "algorithm.adv_estimator=rloo .*has no advantages",
        ),
        (
            {"algorithm": PAIRS | {"norm_adv_by_std_in_grpo": False}},
            "norm_adv_by_std_in_grpo=False .*has no advantages",
        ),
        ({"algorithm": PAIRS | {"use_kl_in_reward": True}}, "use_kl_in_reward=True .*no advant"),
        ({"algorithm": PAIRS | CORRECTION}, "rollout_correction.rollout_is=token .*no advantages"),
        ({"algorithm": PAIRS, "reward": {"whiten": True}}, "reward.whiten=True .*no advantages"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_config(RLConfig.model_validate(changes))


@pytest.mark.parametrize(
    ("changes", "dataflow"),
    [
        ({}, "grpo"),
        ({"algorithm": {"adv_estimator": "gae"}, "critic": {"ppo_epochs": 3}}, "ppo"),
        ({"algorithm": {"adv_estimator": "remax"}, "rollout": {"n": 1}}, "remax"),
        ({"algorithm": {"filter_groups": {"enable": True}}}, "dapo"),
        ({"algorithm": {"dataflow": "dapo", "filter_groups": {"max_num_gen_batches": 2}}}, "dapo"),
        ({"algorithm": {"dataflow": "online_dpo", "preference": {"beta": 0.2}}}, "online_dpo"),
        ({"algorithm": GDPO, "reward": PARTS}, "grpo"),
        (
            {"algorithm": PAIRS, "actor": {"use_kl_loss": False}, "reward": {"clip": [0.0, 1.0]}},
            "online_dpo",
        ),
        ({"algorithm": PAIRS, "trainer": AHEAD}, "online_dpo"),
        (
            {
                "algorithm": {"rollout_correction": {"rollout_is_threshold": 5.0}},
                "trainer": AHEAD,
            },
            "grpo",
        ),
        (
            {
                "algorithm": {"filter_groups": {"enable": True, "metric": "reward"}},
                "trainer": {"mode": "async"},
            },
            "dapo",
        ),
        ({"rollout": {"engine": "vllm", "kv_cache_memory_mb": 999, "vllm": {"sleep": 1}}}, "grpo"),
        ({"rollout": {"engine": "vllm", "parts": 2}}, "grpo"),
        (
            {
                "trainer": {"mode": "async"},
                "rollout": {"engine": "vllm", "kv_on_update": "keep"},
            },
            "grpo",
        ),
        ({"trainer": {"mode": "async"}, "rollout": {"engine": "vllm"}}, "grpo"),
        (
            {
                "trainer": {"mode": "async"},
                "rollout": {"engine": "server", "server": {"urls": ["http://a", "http://b"]}},
            },
            "grpo",
        ),
        (
            {
                "trainer": {
                    "mode": "async",
                    "rollout_workers": 2,
                    "pools": [
                        {"roles": ["actor", "reference"]},
                        {"roles": ["reward"]},
                        {"roles": ["sampler"]},
                    ],
                }
            },
            "grpo",
        ),
        (
            {
                "algorithm": GDPO,
                "reward": {"name": "tiny_engine:digits_and_brevity", "isolation": "none"},
            },
            "grpo",
        ),
    ],
)
def test_accepted(changes: dict[str, Any], dataflow: str) -> None:
    assert check_config(RLConfig.model_validate(changes)).name == dataflow


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"clip": [0.0, 1.0]}}, "reward.clip=.* from its teacher alone"),
        ({"reward": {"overlong_buffer": {"enable": True}}}, "reward.overlong_buffer .*teacher al"),
        ({"reward": {"whiten": True}}, "reward.whiten=True .*has no advantages"),
        ({"algorithm": {"adv_estimator": "gae", "gamma": 0.5}}, "adv_estimator=gae .*no advant"),
        ({"algorithm": {"use_kl_in_reward": True}}, "use_kl_in_reward=True .*no advantages"),
        ({"algorithm": CORRECTION}, "rollout_correction.rollout_is=token .*no advantages"),
    ],
)
def test_what_a_student_does_not_read_is_refused(
    tiny_folder: Path, changes: dict[str, Any], message: str
) -> None:
    algorithm = {"dataflow": "distillation", "teacher": str(tiny_folder)}
    actor = {"use_kl_loss": False, "clip_ratio": 0.3, "old_log_probs": "trainer"}
    student = {"algorithm": algorithm, "actor": actor}
    assert check_config(RLConfig.model_validate(student)).name == "distillation"
    settings = changes | {"algorithm": algorithm | changes.get("algorithm", {}), "actor": actor}
    with pytest.raises(EngineError, match=message):
        check_config(RLConfig.model_validate(settings))


def test_plugins_register_estimators_and_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_plugin.py").write_text(
        "from engine.algorithms.advantages import AdvantageOutputs, register_advantage, to_tokens\n"
        "@register_advantage('sign')\n"
        "def sign(inputs):\n"
        "    tokens = to_tokens(inputs.scores.sign(), inputs.response_mask)\n"
        "    return AdvantageOutputs(tokens, tokens)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"plugins": ["my_plugin"], "algorithm": {"adv_estimator": "sign"}}
    assert check_config(RLConfig.model_validate(changes)).name == "grpo"


def test_the_samplers_of_docs_modes_are_settings_that_a_run_takes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "modes.md").read_text()
    [block] = [part.split("```")[0] for part in page.split("```yaml\n")[1:]]
    config = RLConfig.model_validate(yaml.safe_load(block)["rl"])
    check_config(config)
    pools = {pool.roles: pool for pool in config.trainer.pools}
    sampler = pools[("sampler",)]
    assert config.trainer.rollout_workers * sampler.gpus == 8
    assert sampler.gpus == config.rollout.tensor_parallel_size
    assert not config.rollout.vllm.in_process


DISTILL: dict[str, Any] = {"loss": "jsd", "top_k": 8}


@pytest.mark.parametrize(
    ("distillation", "changes", "message"),
    [
        ({"loss": "jsd"}, {}, "url=http://t.* top_k=0: a server gives log-probs of the likeliest"),
        (DISTILL, {"rollout": {"temperature": 0.7}}, "log-probs at temperature 1"),
        (DISTILL, {"actor": {"parallel": {"tp": 2}}}, "all logits of a token in one place"),
        (DISTILL, {"actor": {"entropy_coeff": 0.1}}, "entropy_coeff=0.1 .*distillation.loss=jsd"),
        (DISTILL, {"actor": {"clip_ratio": 0.1}}, "clip_ratio=0.1 has no effect with algorithm"),
        (DISTILL | {"loss": "forward_kl", "beta": 0.1}, {}, "beta=0.1 has no effect with loss=for"),
        ({"top_k": 8}, {}, "top_k=8 has no effect with loss=policy_gradient"),
    ],
)
def test_distillation_that_does_not_fit_is_refused(
    distillation: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    served = {"teachers": [{"url": "http://t"}]}
    settings = {
        "algorithm": {"dataflow": "distillation", "distillation": distillation | served},
        "actor": {"use_kl_loss": False} | changes.pop("actor", {}),
    } | changes
    with pytest.raises(ConfigError, match=message):
        check_config(RLConfig.model_validate(settings))


@pytest.mark.parametrize(
    ("distillation", "message"),
    [
        ({"teachers": [{}]}, "has a model .* or a url, and not both"),
        ({"teachers": [{"model": "a", "url": "http://t"}]}, "and not both"),
        ({"teachers": [{"model": "a", "rows": "x"}]}, "which need route_by"),
        ({"teachers": [{"model": "a"}], "route_by": "data_source"}, "give each another value"),
    ],
)
def test_teachers_that_contradict_are_refused(distillation: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RLConfig.model_validate({"algorithm": {"distillation": distillation}})
    several = {"teacher": "a", "distillation": {"teachers": [{"model": "b"}]}}
    with pytest.raises(ValidationError, match="put it among these"):
        RLConfig.model_validate({"algorithm": several})


def test_a_row_without_a_teacher_is_named() -> None:
    teachers = [{"model": "a", "rows": "sums"}, {"model": "b", "rows": "words"}]
    section = {"route_by": "data_source", "teachers": teachers}
    algorithm = RLConfig.model_validate({"algorithm": {"distillation": section}}).algorithm
    ids = {"group_ids": torch.arange(2)}
    rows = Batch(ids, {"data_source": ["words", "sums"]})
    assert teacher_weights(algorithm, rows).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    with pytest.raises(DataError, match="'data_source' is 'code' in a row, and no teacher has"):
        teacher_weights(algorithm, Batch(ids, {"data_source": ["words", "code"]}))
    with pytest.raises(DataError, match="is no column of the data; name one of other"):
        teacher_weights(algorithm, Batch(ids, {"other": ["words", "code"]}))
    weighted = {"teachers": [{"model": "a", "weight": 3}, {"model": "b"}]}
    algorithm = RLConfig.model_validate({"algorithm": {"distillation": weighted}}).algorithm
    assert teacher_weights(algorithm, rows).tolist() == [[0.75, 0.25]] * 2


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
        {"weights": "folder", "reload_url": "/reload", "version_url": "/info"},
    ],
)
def test_what_fits_is_let_through(server: dict[str, Any]) -> None:
    assert check_config(settings(URL | server)).name == "grpo"
