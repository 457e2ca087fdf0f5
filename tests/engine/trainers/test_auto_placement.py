"""`trainer.placement: auto`: settings for the machines that Ray reports, new at each start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from tiny_engine import arithmetic_rows

from engine.config import LoRAConfig, RLConfig
from engine.data.loader import PromptLoader
from engine.errors import ConfigError, PlacementError
from engine.planner import Cluster, Machine, PlacementPlan, explain
from engine.planner.memory import RUNTIME
from engine.planner.resources import GIB
from engine.trainers import auto_placement as auto
from engine.trainers.resume import run_settings
from engine.trainers.rl import RLTrainer
from engine.trainers.run_plan import check_config
from engine.trainers.run_spec import layout_of

RESPONSE, LONGEST = 6, 40


def settings(**sections: Any) -> RLConfig:
    values: dict[str, Any] = {
        "actor": {"optim": {"lr": 5e-3, "weight_decay": 0.0, "warmup_ratio": 0.0}},
        "rollout": {"n": 2},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {
            "total_training_steps": 3,
            "train_batch_size": 4,
            "placement": "auto",
        },
    }
    for section, content in sections.items():
        values[section] = values.get(section, {}) | content
    return RLConfig.model_validate(values)


def cores(count: int, memory: int, machines: int = 1) -> Cluster:
    return Cluster(tuple(Machine(f"m{i}", float(count), memory) for i in range(machines)))


def gpus(count: int, gib: float) -> Cluster:
    return Cluster((Machine("m", 32.0, 900 * GIB, count, int(gib * GIB), "H100"),))


def resolved(folder: Path, config: RLConfig, cluster: Cluster, rank: int = 0) -> RLConfig:
    with mock.patch.object(auto.planner, "read_cluster", return_value=cluster):
        return auto.resolve_auto(
            config,
            model_path=str(folder),
            lora=LoRAConfig(rank=rank),
            dtype="float32",
            max_response_length=RESPONSE,
            max_model_len=LONGEST,
        )


def tight(folder: Path, config: RLConfig) -> Cluster:
    """Two machines of a core each, with so little memory that one rank alone doesn't fit."""
    for more in range(9, 70):
        cluster = cores(1, RUNTIME + int(1.25**more * 1000), machines=2)
        try:
            found = resolved(folder, config, cluster)
        except PlacementError:
            continue
        assert layout_of("actor", found).world_size == 2
        return cluster
    raise AssertionError("one rank always fits")


_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768, "tie_word_embeddings": False}
_MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-1.5B": _QWEN2
    | {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936}
    | {"tie_word_embeddings": True},
    "Qwen2.5-7B": _QWEN2
    | {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
    "Qwen3-32B": _QWEN2
    | {"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "head_dim": 128}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 25600}
    | {"vocab_size": 151936},
    "Qwen3-30B-A3B": _QWEN2
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144}
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    | {"vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
H100, SMALL = ("H100", 79.6), ("L4", 23.6)
_ALONE = {"use_kl_loss": False}


def planned(
    folder: Path,
    model: str,
    machines: int,
    count: int,
    kind: tuple[str, float],
    response: int,
    lora: dict[str, Any] | None = None,
    **sections: Any,
) -> PlacementPlan:
    """The plan of a run with prompts of 512 tokens, as `trainer.placement: auto` makes it."""
    (folder / "config.json").write_text(json.dumps(_MODELS[model]))
    actor, trainer = sections.pop("actor", {}), sections.pop("trainer", {})
    parallel = {"compute_dtype": "bfloat16"} | actor.get("parallel", {})
    sections |= {"actor": actor | {"parallel": parallel}}
    sections |= {"trainer": {"placement": "auto", "train_batch_size": 128} | trainer}
    sections["rollout"] = {"n": 8, "engine": "vllm"} | sections.get("rollout", {})
    config = RLConfig.model_validate(sections)
    adapters = LoRAConfig.model_validate(lora or {})
    work = auto.workload(
        config,
        model_path=str(folder),
        lora=adapters,
        dtype="bfloat16",
        max_response_length=response,
        max_model_len=response + 512,
    )
    machine = Machine("m", 16.0 * count, 250 * count * GIB, count, int(kind[1] * GIB), kind[0])
    return auto.plan_for(config, work, Cluster((machine,) * machines), adapters)


APART = {"vllm": {"in_process": False, "gpu_memory_utilization": 0.9}}
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "1.5B on one GPU": (
        ("Qwen2.5-1.5B", 1, 1, H100, 1024),
        {},
        r"one rank, rollout tp 1, 8192 tokens .* rollout with 0.5 of the GPU",
    ),
    "7B on eight, 4096 tokens": (
        ("Qwen2.5-7B", 1, 8, H100, 4096),
        {"rollout": {"tensor_parallel_size": 2}},
        r"fsdp=8, rollout tp 2",
    ),
    "32B on two machines, asynchronous": (
        ("Qwen3-32B", 2, 8, H100, 4096),
        {"trainer": {"mode": "async"}, "rollout": APART, "actor": _ALONE},
        r"samplers of 2 GPUs decode",
    ),
    "32B on two machines, HYBRID_SHARD, asynchronous": (
        ("Qwen3-32B", 2, 8, H100, 4096),
        {
            "trainer": {"mode": "async"},
            "rollout": APART | {"tensor_parallel_size": 2},
            "actor": _ALONE | {"parallel": {"dp": 2, "fsdp": 4}},
        },
        r"dp=2 fsdp=4, .* offload moments.* samplers? of 2 GPUs decode",
    ),
    "a mixture on eight": (
        ("Qwen3-30B-A3B", 1, 8, H100, 4096),
        {"actor": _ALONE},
        r"fsdp=8, rollout tp 4",
    ),
    "7B on eight, 32k tokens": (
        ("Qwen2.5-7B", 1, 8, H100, 32768 - 512),
        {},
        r"fsdp=2 sp=4, rollout tp 4",
    ),
    "7B with LoRA in 4 bits on a small GPU, native": (
        ("Qwen2.5-7B", 1, 1, SMALL, 1024, {"rank": 16, "quantize": "nf4"}),
        {"rollout": {"engine": "native"}},
        r"one rank, .* rollout with 128 rows at once, adapters beside the base",
    ),
    "7B with LoRA in 4 bits on a small GPU, vLLM": (
        ("Qwen2.5-7B", 1, 1, SMALL, 1024, {"rank": 16, "quantize": "nf4"}),
        {},
        r"one rank, .* rollout with 0.65 of the GPU",
    ),
    "7B with LoRA in 16 bits on a small GPU, native": (
        ("Qwen2.5-7B", 1, 1, SMALL, 1024, {"rank": 16}),
        {"rollout": {"engine": "native"}},
        r"one rank, .* recompute .* rollout with 64 rows at once, adapters beside the base",
    ),
    "7B with LoRA in 16 bits on a small GPU, vLLM": (
        ("Qwen2.5-7B", 1, 1, SMALL, 1024, {"rank": 16}),
        {},
        r"one rank, .* recompute .* rollout with 0.85 of the GPU, adapters beside the base",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layouts_of_users_of_gpus(case: str, tmp_path: Path) -> None:
    """Each finds one that fits its GPUs, with what the reader of the plan is to see."""
    of, sections, said = CASES[case]
    plan = planned(tmp_path, *of, **sections)
    assert plan.chosen.fits
    text = " ".join(explain(plan).split())
    assert re.search(said, text), text


def test_ranks_decode_together_where_they_share_a_key_head(tmp_path: Path) -> None:
    tp = {"rollout": {"tensor_parallel_size": 4}}
    plan = planned(tmp_path, "Qwen2.5-1.5B", 1, 4, H100, 1024, **tp)  # which has two
    assert plan.chosen.candidate.rollout_tp == 4


def test_samplers_are_compared_with_what_the_mode_sync_would_take(tmp_path: Path) -> None:
    """It has a pass less: the log-probs of rollout are of the same weights."""
    sync = planned(tmp_path, "Qwen2.5-7B", 1, 8, H100, 1024)
    apart = planned(tmp_path, "Qwen2.5-7B", 1, 8, H100, 1024, trainer={"mode": "async"})
    assert apart.together == sync.chosen.price.total


def test_sequences_over_more_ranks_than_heads_allow_name_the_next_best(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(tmp_path, "Qwen2.5-7B", 1, 8, H100, 4096, actor={"parallel": {"sp": 8}})
    assert "sp=8 does not divide the model's num_attention_heads=28" in str(refused.value)
    assert "the next best is fsdp=2 sp=4" in str(refused.value)
    assert "next best, without these: fsdp=8" in str(refused.value)


# Rollout, model.lora, and how the planner has rollout decode the adapters ("": left to the engine).
DECODED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"engine": "native"}, {}, "adapter"),
    ({"engine": "vllm"}, {}, "adapter"),
    ({"engine": "native"}, {"quantize": "nf4"}, "adapter"),
    ({"engine": "vllm"}, {"quantize": "nf4"}, ""),  # vLLM's base is dense
    ({"engine": "native", "lora": "merged"}, {"quantize": "nf4"}, "merged"),
]
TWO_BASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"engine": "native", "lora": "merged"}, {}),
    ({"engine": "vllm", "lora": "merged"}, {}),
    ({"engine": "vllm", "vllm": {"in_process": False}}, {}),
    ({"engine": "vllm", "vllm": {"dtype": "float16"}}, {}),
]


@pytest.mark.parametrize(("rollout", "lora", "decoded"), DECODED)
def test_a_small_gpu_decides_how_adapters_are_decoded(
    rollout: dict[str, Any],
    lora: dict[str, Any],
    decoded: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora = {"rank": 16} | lora
    found = gpu_run(tmp_path, 23.6, monkeypatch, "Qwen2.5-7B", lora, rollout=rollout)
    assert found.rollout.lora == decoded


@pytest.mark.parametrize(("engine", "decoded"), [("native", ""), ("vllm", "adapter")])
def test_native_merges_where_two_bases_fit(
    engine: str, decoded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes adapters on every GPU."""
    found = gpu_run(tmp_path, 79.6, monkeypatch, lora={"rank": 16}, rollout={"engine": engine})
    assert found.rollout.lora == decoded


@pytest.mark.parametrize(("rollout", "lora"), TWO_BASES)
def test_two_dense_bases_do_not_fit_a_small_gpu(
    rollout: dict[str, Any], lora: dict[str, Any], tmp_path: Path
) -> None:
    of = (tmp_path, "Qwen2.5-7B", 1, 1, SMALL, 1024, {"rank": 16} | lora)
    with pytest.raises(PlacementError, match=r"or set model\.lora\.quantize=nf4"):
        planned(*of, rollout=rollout)


def test_a_rank_of_several_has_a_whole_base_for_its_adapters(tmp_path: Path) -> None:
    """Training shards it; rollout decodes a whole one, and merges into another where it must."""
    of = (tmp_path, "Qwen2.5-7B", 1, 2, H100, 1024, {"rank": 16})
    fsdp = {"parallel": {"fsdp": 2}}
    copies = {
        lora: planned(*of, actor=fsdp, rollout={"engine": "native", "lora": lora}).chosen.memory
        for lora in ("adapter", "merged")
    }
    base = 2 * copies["merged"].weights
    assert copies["adapter"].rollout == pytest.approx(base, rel=0.02)
    assert copies["merged"].rollout == pytest.approx(2 * base, rel=0.02)


def gpu_run(
    folder: Path,
    memory: float,
    monkeypatch: pytest.MonkeyPatch,
    model: str = "Qwen2.5-1.5B",
    lora: dict[str, Any] | None = None,
    **sections: Any,
) -> RLConfig:
    """The settings of a run in this process on a GPU of so many GiB."""
    (folder / "config.json").write_text(json.dumps(_MODELS[model]))
    properties = SimpleNamespace(total_memory=int(memory * GIB))
    monkeypatch.setattr(auto.liger, "is_installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    sections.setdefault("trainer", {"placement": "local", "train_batch_size": 128})
    sections["rollout"] = {"n": 8, "engine": "vllm"} | sections.get("rollout", {})
    return auto.resolve_auto(
        RLConfig.model_validate(sections),
        model_path=str(folder),
        lora=LoRAConfig.model_validate(lora or {}),
        dtype="bfloat16",
        max_response_length=1024,
        max_model_len=1536,
    )


@pytest.mark.parametrize(
    ("memory", "actor", "tokens", "recompute", "said"),
    [
        (140, {}, 16384, None, "16384 tokens a micro-batch, activations kept"),
        (79.6, {}, 8192, None, "; 16384 tokens a micro-batch, activations kept, rollout with 0.5"),
        (38, {}, 2048, "selective", "recompute selectively, rollout with 0.35 of the GPU: "),
        (36, {}, 8192, True, "recompute, rollout with 0.3 of the GPU: "),
        (36, {"max_tokens_per_micro_batch": 2048}, 2048, True, "recompute, "),
        (79.6, {"parallel": {"activation_checkpointing": True}}, 16384, True, "recompute, "),
        (44, {"parallel": {"activation_checkpointing": "selective"}}, 8192, "selective", "ively"),
        (
            79.6,
            {"parallel": {"activation_offload": True}},
            16384,
            None,
            "offload layers' inputs, re",
        ),
        (36, {"parallel": {"activation_checkpointing": False}}, 1024, False, "and may fail"),
    ],
)
def test_a_gpu_s_memory_decides_what_is_computed_again(
    memory: float,
    actor: dict[str, Any],
    tokens: int,
    recompute: bool | str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = gpu_run(tmp_path, memory, monkeypatch, actor=actor)
    assert found.actor.max_tokens_per_micro_batch == tokens
    assert found.actor.parallel.activation_checkpointing == recompute
    line = capsys.readouterr().out
    assert said in line
    assert f"of {memory:.1f} GiB a GPU by the planner's estimate" in line


def test_a_critic_of_its_own_layout_computes_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = {"parallel": {"packing": False}}
    options = {"algorithm": {"adv_estimator": "gae"}, "critic": critic, "rollout": {"n": 1}}
    found = gpu_run(tmp_path, 58, monkeypatch, **options)
    mode = found.actor.parallel.activation_checkpointing
    assert mode
    assert found.critic.parallel is not None
    assert found.critic.parallel.activation_checkpointing == mode


def test_a_laptop_runs_as_without_auto(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings()
    found = resolved(tiny_folder, config, cores(2, 4 * GIB))
    [policy, reward] = found.trainer.pools
    assert (policy.roles, policy.cpus) == (("actor", "rollout", "reference"), 2.0)
    assert (reward.roles, reward.cpus) == (("reward",), 0.0)
    assert found.trainer.placement == "ray"
    assert found.actor == config.actor
    assert found.rollout == config.rollout
    said = capsys.readouterr().out
    assert "auto found 1 machine, 2 cores, 4.0 GiB for workers" in said
    assert "chosen  one rank" in said
    untouched = settings(trainer={"placement": "ray"})
    assert resolved(tiny_folder, untouched, cores(2, 4 * GIB)) is untouched


def test_gpus_get_a_rank_each_and_what_is_set_stays(tiny_folder: Path) -> None:
    set_here = {"parallel": {"tp": 2}, "max_tokens_per_micro_batch": 128}
    found = resolved(tiny_folder, settings(actor=set_here), gpus(2, 40))
    assert found.actor.parallel.tp == 2
    assert found.actor.max_tokens_per_micro_batch == 128
    assert found.trainer.pools[0].gpus == 1.0
    critic = {"parallel": {"fsdp": 2}, "max_tokens_per_micro_batch": 512}
    ppo = settings(algorithm={"adv_estimator": "gae"}, critic=critic)
    found = resolved(tiny_folder, ppo, gpus(2, 40))
    assert found.critic == ppo.critic
    assert layout_of("actor", found).world_size == 2


def test_pools_that_are_set_stay_and_bound_the_layout(tiny_folder: Path) -> None:
    pools = [
        {"roles": ["actor", "rollout", "reference"], "cpus": 1, "gpus": 1},
        {"roles": ["reward"], "gpus": 3},
    ]
    config = settings(trainer={"pools": pools})
    found = resolved(tiny_folder, config, gpus(4, 40))
    assert found.trainer.pools == config.trainer.pools
    assert layout_of("actor", found).world_size == 1
    with pytest.raises(ConfigError, match=r"no valid layout .* can't hold the placement"):
        resolved(tiny_folder, settings(trainer={"pools": pools}), gpus(3, 40))


def test_rollout_that_runs_ahead_has_its_own_place(tiny_folder: Path) -> None:
    ahead = settings(trainer={"mode": "one_step_off"})
    found = resolved(tiny_folder, ahead, gpus(2, 40)).trainer.pools
    assert [pool.gpus for pool in found] == [1.0, 0.0, 1.0]
    found = resolved(tiny_folder, ahead, cores(4, 8 * GIB)).trainer.pools
    assert [pool.cpus for pool in found] == [2.0, 0.0, 2.0]
    with pytest.raises(ConfigError, match=r"there is one; set trainer.mode=sync"):
        resolved(tiny_folder, ahead, gpus(1, 40))


@pytest.mark.parametrize("mode", ["one_step_off", "async"])
def test_samplers_get_gpus_of_their_own(
    tiny_folder: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolved(tiny_folder, settings(trainer={"mode": mode}), gpus(2, 40))
    assert [(pool.roles[0], pool.gpus) for pool in found.trainer.pools] == [
        ("actor", 1.0),
        ("reward", 0.0),
        ("sampler", 1.0),
    ]
    assert found.trainer.rollout_workers == 1
    assert "roles   1 GPU computes for" in capsys.readouterr().out
    check_config(found)
    two = settings(trainer={"mode": mode, "rollout_workers": 2})
    assert resolved(tiny_folder, two, gpus(4, 40)).trainer.rollout_workers == 2
    vllm = settings(
        trainer={"mode": mode}, rollout={"n": 2, "engine": "vllm", "tensor_parallel_size": 2}
    )
    found = resolved(tiny_folder, vllm, gpus(3, 40))
    assert found.rollout.tensor_parallel_size == 2
    assert found.rollout.vllm.in_process is False
    assert found.trainer.pools[-1].gpus == 2.0
    server = {"engine": "server", "server": {"urls": ["http://a", "http://b"]}}
    remote = resolved(tiny_folder, settings(trainer={"mode": mode}, rollout=server), gpus(2, 40))
    assert remote.trainer.rollout_workers == 1
    assert sum(pool.gpus for pool in remote.trainer.pools) == 1.0


def test_adapters_and_mini_batches_bound_the_layout(tiny_folder: Path) -> None:
    few = settings(actor={"ppo_mini_batch_size": 2, "parallel": {"dp": 4}})
    with pytest.raises(ConfigError, match="too few for 4 mini-batches"):
        resolved(tiny_folder, few, gpus(4, 40))
    layout = layout_of("actor", resolved(tiny_folder, settings(), gpus(2, 40), rank=4))
    assert layout.tp * layout.pp * layout.sp == 1


def test_another_plan_is_the_same_run(tiny_folder: Path) -> None:
    config = settings()
    one = resolved(tiny_folder, config, cores(2, 4 * GIB))
    two = resolved(tiny_folder, config, tight(tiny_folder, config))
    assert layout_of("actor", one) != layout_of("actor", two)
    assert run_settings(one, RESPONSE, 0) == run_settings(two, RESPONSE, 0)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_a_restart_on_other_machines_gets_a_new_layout_and_resumes(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings()

    def run(steps: int) -> tuple[RLTrainer, int]:
        loader = PromptLoader(pd.DataFrame(arithmetic_rows(16)), 4, 0)
        with RLTrainer(
            tiny_folder, config, loader, max_response_length=RESPONSE, max_model_len=LONGEST
        ) as trainer:
            trainer.fit(steps, tmp_path / "run")
            return trainer, trainer.roles.actor.world_size

    first, ranks = run(1)  # on what the real Ray has
    assert (first.step, ranks) == (1, 1)
    # The same Ray, reported as two machines on which one rank alone doesn't fit.
    small = tight(tiny_folder, config)
    monkeypatch.setattr(auto.planner, "read_cluster", lambda kinds: small)
    second, ranks = run(1)
    assert (second.step, ranks) == (2, 2)
    assert [row["step"] for row in second.history] == [1.0, 2.0]
    assert second.history[0] == first.history[0]
    assert all(row["actor/grad_norm"] > 0 for row in second.history)
