"""Actor, critic, mixtures and distillation on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_models import CHANGES
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import fill_value_head, save_family, tiny_model, training_batch, write_tiny_folder
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import load_state_dict

from engine.batch import Batch
from engine.checkpoint import CheckpointStore
from engine.config import (
    ActorConfig,
    CriticConfig,
    DistillationConfig,
    LoRAConfig,
    ParallelConfig,
    RolloutConfig,
    TeacherConfig,
)
from engine.controller.worker_host import (
    BatchArgument,
    RemoteCall,
    RoleSpec,
    WorkerHost,
    merge_results,
    shard_rows,
)
from engine.models import create_critic_model, load_model
from engine.parallel.layout import Layout
from engine.parallel.module_shards import local_tensor
from engine.rollout.native.engine import NativeEngine
from engine.rollout.protocol import SamplingParams
from engine.runtime.rollout_weights import rollout_weights
from engine.workers.actor import ActorWorker
from engine.workers.critic import CriticWorker
from engine.workers.frozen_models import TeacherWorker
from engine.workers.role import WorkerContext

ROWS, STEPS = 8, 2


def published(folder: str, parallel: dict[str, Any], out: str, lora: int) -> Tensor | None:
    """After an update: the weights for other processes, and a Hugging Face folder at `out`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = ActorConfig.model_validate({"parallel": parallel, "use_kl_loss": False})
    layout = Layout.of(config.parallel)
    worker = ActorWorker(
        WorkerContext("actor", rank, world, layout=layout),
        model_path=folder,
        config=config,
        temperature=0.8,
        total_steps=STEPS,
        seed=0,
        lora=LoRAConfig(rank=lora),
    )
    worker.update(shard_rows(training_batch(ROWS), layout.data_shard(rank))[0])
    worker.save(out)
    packed = worker.weights()
    assert packed["policy_version"].tolist() == [1]
    return packed.as_dict().get("weights")


def course(folder: str, parallel: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Two updates: metrics, log-probs before each, and the weights at the end, whole."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = ActorConfig.model_validate(
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "entropy_coeff": 0.01,
            "optim": {"lr": 1e-2, "grad_clip": 0.3, "warmup_ratio": 0.0},
            "max_tokens_per_micro_batch": 64,
            "parallel": parallel,
        }
        | changes
    )
    layout = Layout.of(config.parallel)
    worker = ActorWorker(
        WorkerContext("actor", rank, world, layout=layout),
        model_path=folder,
        config=config,
        temperature=0.8,
        total_steps=STEPS,
        seed=0,
    )
    metrics, log_probs = [], []
    share = layout.data_shard(rank)
    for step in range(STEPS):
        batch = training_batch(ROWS, seed=step)
        batch["advantages"][[0, 3, 4]] = 0.0  # skipped, unevenly over ranks
        mine, _ = shard_rows(batch, share)
        log_probs.append(worker.log_probs(mine)["old_log_probs"])
        metrics.append(worker.update(mine))
    whole = {name: t.clone() for name, t in worker.sharded.full_tensors()}
    return {"metrics": metrics, "log_probs": log_probs, "weights": whole, "part": share.index}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_family("qwen2", tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, Any]:
    [result] = run_ranks(1, course, folder, {}, {})
    return result


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2},
    {"pp": 2, "packing": True},
    {"fsdp": 2, "activation_checkpointing": True, "offload_params": True},
    {"pp": 2, "fsdp": 2, "offload_optimizer": True},
    {"sp": 2},
]


MORE: list[dict[str, Any]] = [
    {"tp": 2},
    {"pp": 2, "packing": False},
    {"fsdp": 2},
    {"fsdp": 4, "activation_offload": True, "offload_policy": True},
    {"tp": 2, "sequence_parallel": False},
    {"fsdp": 2, "tp": 2, "offload_optimizer": True},
    {"pp": 2, "fsdp": 2, "activation_checkpointing": "selective"},
    {"sp": 2, "tp": 2, "activation_checkpointing": "selective"},
    {"dp": 2, "fsdp": 2},
    {"dp": 2, "tp": 2},
    {"pp": 2, "tp": 2},
    {"dp": 2, "pp": 2},
    {"fsdp": 2, "sp": 2},
    {"pp": 2, "sp": 2},
]


@pytest.mark.parametrize(
    "parallel",
    and_slow(LAYOUTS, MORE),
    ids=lambda p: " ".join(f"{k}={v}" for k, v in p.items()),
)
def test_every_layout_trains_as_one_rank(
    folder: str, alone: dict[str, Any], parallel: dict[str, Any]
) -> None:
    sizes = {k: v for k, v in parallel.items() if type(v) is int}
    same_course(run_ranks(Layout(**sizes).world_size, course, folder, parallel, {}), alone)


def phases(folder: str, parallels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-probs, metrics and sampled tokens of two steps of each layout, and the weights after."""
    found = []
    for parallel in parallels:
        one = worker(folder, parallel, use_kl_loss=False)
        served = rollout_weights(one.sharded, RolloutConfig(), lambda: load_model(folder))
        engine, seen = NativeEngine(served.model), dict[str, Any]()
        share = Layout.of(one.config.parallel).data_shard(dist.get_rank())
        stored = [local_tensor(p).untyped_storage() for p in one.sharded.module.parameters()]
        for step in range(STEPS):
            mine, _ = shard_rows(training_batch(ROWS, seed=step), share)
            log_probs = one.log_probs(mine)["old_log_probs"]
            metrics = one.update(mine)
            served.refresh()
            assert {s.size() == 0 for s in stored} == {parallel.get("offload_params", False)}
            done = engine.generate([[5, 6, 7], [8]], SamplingParams(n=2, max_new_tokens=4, seed=3))
            seen[f"step {step}"] = (log_probs, metrics, [c.token_ids for c in done])
        weights = {name: t.clone() for name, t in one.sharded.full_tensors()}
        found.append(seen | {"weights": weights})
    return found


def test_offloading_weights_between_phases_changes_no_bit(folder: str) -> None:
    parallels: list[dict[str, Any]] = [{"fsdp": 2}, {"fsdp": 2, "offload_params": True}]
    for stays, moves in run_ranks(2, phases, folder, parallels):
        for step in range(STEPS):
            (log_probs, *rest), (moved_log_probs, *moved) = (
                found[f"step {step}"] for found in (stays, moves)
            )
            assert torch.equal(log_probs, moved_log_probs)
            assert rest == moved
        assert all(torch.equal(moves["weights"][k], w) for k, w in stays["weights"].items())


def same_course(results: list[dict[str, Any]], alone: dict[str, Any], strays: float = 0.0) -> None:
    """Ranks' metrics, log-probs and weights are those of one rank.

    `strays`: the share of a weight's elements that may be others, for gradients that are rounding.
    """
    for result in results:
        for step in range(STEPS):
            for name, value in alone["metrics"][step].items():
                assert result["metrics"][step][name] == pytest.approx(value, rel=2e-4, abs=2e-5), (
                    name
                )
        for name, tensor in alone["weights"].items():
            if name.endswith(BLIND):
                continue
            # An Adam step moves a weight by up to lr, whatever its gradient's size.
            stray = ~torch.isclose(result["weights"][name], tensor, rtol=1e-4, atol=1e-4)
            assert int(stray.sum()) <= strays * tensor.numel(), name
    assert joined(results) == pytest.approx(flat(alone["log_probs"]), rel=1e-4, abs=1e-5)


Case = tuple[str, dict[str, Any]]


# Softmax is blind to a key's bias in dimensions that are not rotated: its gradient is rounding.
BLIND = ("query_key_value.bias", "k_proj.bias")


SMALL_STEPS = {"optim": {"lr": 5e-4, "grad_clip": 0.3, "warmup_ratio": 0.0}}


def courses(root: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Those of several families, whose weights are published as well."""
    found = []
    for number, (family, parallel) in enumerate(cases):
        folder = f"{root}/{family}"
        found.append(course(folder, parallel, SMALL_STEPS))
        published(folder, parallel, f"{root}/{len(parallel)}-{number}", 0)
    return found


FAMILIES: list[Case] = [("phi3", {"tp": 2}), ("gemma2", {"pp": 2})]


EVERY: list[Case] = [(f, {axis: 2}) for f in CHANGES for axis in ("tp", "pp")]


@pytest.mark.parametrize("cases", and_slow([FAMILIES], [EVERY]), ids=len)
def test_other_families_train_and_save_as_on_one_rank(tmp_path: Path, cases: list[Case]) -> None:
    for family, _ in cases:
        write_tiny_folder(tmp_path / family, family=family)
    [alone] = run_ranks(1, courses, str(tmp_path), [(family, {}) for family, _ in cases])
    results = run_ranks(2, courses, str(tmp_path), cases)
    for number, case in enumerate(cases):
        same_course([result[number] for result in results], alone[number], strays=0.01)
        one, two = (load_model(tmp_path / f"{n}-{number}").state_dict() for n in (0, 1))
        assert one.keys() == two.keys(), case
        for name, tensor in one.items():
            stray = ~torch.isclose(two[name], tensor, rtol=1e-4, atol=1e-5)
            assert int(stray.sum()) <= 0.01 * tensor.numel() or name.endswith(BLIND), (case, name)


@pytest.mark.parametrize(
    ("parallel", "lora"),
    and_slow(
        [({"fsdp": 2}, 4), ({"pp": 2}, 0)],
        [({"fsdp": 2}, 0), ({"pp": 2}, 4), ({"tp": 2}, 0), ({"tp": 2}, 4)],
    ),
)
def test_what_ranks_publish_is_what_one_rank_does(
    tmp_path: Path, parallel: dict[str, int], lora: int
) -> None:
    folder = str(write_tiny_folder(tmp_path / "start"))
    [wanted] = run_ranks(1, published, folder, {}, str(tmp_path / "one"), lora)
    found, other = run_ranks(2, published, folder, parallel, str(tmp_path / "two"), lora)
    assert other is None
    torch.testing.assert_close(
        found.view(torch.float32), wanted.view(torch.float32), rtol=1e-4, atol=1e-5
    )
    one, two = (load_model(tmp_path / name).state_dict() for name in ("one", "two"))
    start = load_model(folder).state_dict()
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(tensor, start[name]) for name, tensor in two.items())


def flat(parts: list[Tensor]) -> list[float]:
    return torch.cat([part.flatten() for part in parts]).tolist()


def joined(results: list[dict[str, Any]]) -> list[float]:
    """The ranks' log-probs as the controller would stack them."""
    parts = {result["part"]: result for result in reversed(results)}
    ordered = [parts[index] for index in sorted(parts)]
    return flat([torch.cat([r["log_probs"][step] for r in ordered]) for step in range(STEPS)])


CRITIC_ROWS, CRITIC_STEPS = 6, 2


def critic_course(critic_folder: str, parallel: dict[str, Any], lora: int = 0) -> dict[str, Any]:
    """Two updates: metrics, values before each and at the end, and the last weights, whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded = ParallelConfig.model_validate(parallel)
    layout = Layout.of(sharded)
    changes: dict[str, Any] = {
        "optim": {"lr": 1e-3 if lora else 1e-2, "grad_clip": 0.3},
        "max_tokens_per_micro_batch": 64,
    }
    changes |= {"lora": {"rank": lora}}
    worker = CriticWorker(
        WorkerContext("critic", rank, world, layout=layout),
        model_path=critic_folder,
        config=CriticConfig.model_validate(changes),
        total_steps=CRITIC_STEPS,
        seed=0,
        parallel=sharded,
    )
    fill_value_head(worker.sharded)
    share = layout.data_shard(rank)
    batches = [
        shard_rows(training_batch(CRITIC_ROWS, seed=step), share)[0] for step in range(CRITIC_STEPS)
    ]
    values, metrics = [worker.values(batches[0])["values"]], []
    for batch in batches:
        metrics.append(worker.update(batch))
        values.append(worker.values(batch)["values"])
    whole = {name: t.clone() for name, t in worker.sharded.full_tensors()}
    saved = set(worker.state_dict()["model"])
    return {"metrics": metrics, "values": values, "weights": whole, "share": share, "saved": saved}


@pytest.fixture(scope="module")
def critic_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_family("qwen2", tmp_path_factory.mktemp("critic")))


@pytest.fixture(scope="module")
def lone_critic(critic_folder: str) -> dict[str, Any]:
    [result] = run_ranks(1, critic_course, critic_folder, {})
    return result


CRITIC_LAYOUTS: list[dict[str, Any]] = [{"sp": 2}, {"sp": 2, "packing": True}]


MORE_CRITIC_LAYOUTS: list[dict[str, Any]] = [
    {"sp": 2, "tp": 2, "packing": True},
    {"pp": 2, "sp": 2, "packing": True},
    {"sp": 2, "activation_checkpointing": True, "offload_params": True},
    {"fsdp": 2, "packing": True},
    {"fsdp": 2, "sp": 2},
    {"sp": 2, "tp": 2},
    {"pp": 2, "sp": 2},
]


@pytest.mark.parametrize(
    "parallel",
    and_slow(CRITIC_LAYOUTS, MORE_CRITIC_LAYOUTS),
    ids=lambda p: " ".join(f"{k}={v}" for k, v in p.items()),
)
def test_every_layout_is_as_one_rank(
    critic_folder: str, lone_critic: dict[str, Any], parallel: dict[str, Any]
) -> None:
    sizes = {k: v for k, v in parallel.items() if type(v) is int}
    same_critic_course(
        run_ranks(Layout(**sizes).world_size, critic_course, critic_folder, parallel), lone_critic
    )


ADAPTED: list[dict[str, Any]] = [{"tp": 2}]


MORE_ADAPTED: list[dict[str, Any]] = [{"fsdp": 2}, {"pp": 2}, {"sp": 2}, {"fsdp": 2, "tp": 2}]


@pytest.mark.parametrize("parallel", and_slow(ADAPTED, MORE_ADAPTED), ids=str)
def test_adapters_and_the_head_are_what_is_trained(
    critic_folder: str, parallel: dict[str, Any]
) -> None:
    [lone_critic] = run_ranks(1, critic_course, critic_folder, {}, 4)
    start = create_critic_model(load_model(critic_folder)).state_dict()
    for name, weight in lone_critic["weights"].items():
        trained = ".lora_" in name or name.startswith("head.")
        assert (name in lone_critic["saved"]) == trained
        if not trained:
            assert torch.equal(weight, start[name.replace(".base_layer", "")]), name
    assert any(
        ".lora_B." in name and weight.any() for name, weight in lone_critic["weights"].items()
    )
    same_critic_course(
        run_ranks(Layout(**parallel).world_size, critic_course, critic_folder, parallel, 4),
        lone_critic,
        0.02,
    )


def same_critic_course(
    results: list[dict[str, Any]], lone_critic: dict[str, Any], strays: float = 0.0
) -> None:
    """`strays`: the share of a weight's elements that may be others, for rounded gradients."""
    assert lone_critic["values"][0].abs().max() > 0.1
    for result in results:
        for step in range(CRITIC_STEPS):
            assert result["metrics"][step] == pytest.approx(
                lone_critic["metrics"][step], rel=2e-4, abs=2e-5
            )
        for name, tensor in lone_critic["weights"].items():
            # An Adam step moves a weight by up to lr = 1e-2, whatever its gradient's size.
            stray = ~torch.isclose(result["weights"][name], tensor, rtol=1e-4, atol=1e-4)
            assert int(stray.sum()) <= strays * tensor.numel(), name
        for index, values in enumerate(lone_critic["values"]):
            wanted = shard_rows(Batch({"values": values}), result["share"])[0]["values"]
            close = 1e-5 if index == 0 else 5e-4  # weights have moved
            torch.testing.assert_close(result["values"][index], wanted, rtol=1e-4, atol=close)


MIXTURE_ROWS, MIXTURE_STEPS = 4, 2


def worker(folder: str, parallel: dict[str, Any], **changes: Any) -> ActorWorker:
    ranks = dist.is_initialized()
    config = ActorConfig.model_validate(
        {
            "use_kl_loss": False,
            "optim": {"lr": 1e-2, "grad_clip": 0.3, "warmup_ratio": 0.0},
            "parallel": parallel,
        }
        | changes
    )
    layout = Layout.of(config.parallel)
    rank, world = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
    return ActorWorker(
        WorkerContext("actor", rank, world, layout=layout),
        model_path=folder,
        # A row a micro-batch: the balancing loss is one of the rows that are passed together.
        config=config.model_copy(update={"max_tokens_per_micro_batch": 1}),
        temperature=0.8,
        total_steps=2 * MIXTURE_STEPS,
        seed=0,
    )


def train(one: ActorWorker, begin: int = 0) -> list[dict[str, float]]:
    share = one.context.layout.data_shard(one.context.rank)  # type: ignore[union-attr]
    batches = [
        training_batch(MIXTURE_ROWS, seed=step) for step in range(begin, begin + MIXTURE_STEPS)
    ]
    return [one.update(shard_rows(batch, share)[0]) for batch in batches]


def mixture_courses(folder: str, layouts: list[dict[str, Any]], out: str) -> list[dict[str, Any]]:
    """Of each layout: two updates, the weights after, where they lie, and what rollout samples."""
    found = []
    for number, parallel in enumerate(layouts):
        one = worker(folder, parallel, router_aux_loss_coef=0.5)
        metrics = train(one)
        weights = {name: t.clone() for name, t in one.sharded.full_tensors()}
        served = rollout_weights(one.sharded, RolloutConfig(), lambda: load_model(folder))
        served.refresh()
        engine = NativeEngine(served.model)
        done = engine.generate([[5, 6, 7], [8]], SamplingParams(n=2, max_new_tokens=4, seed=3))
        one.save(f"{out}/{number}")
        kept = [p for p in one.sharded.module.parameters() if isinstance(p, DTensor)]
        found.append(
            {
                "metrics": metrics,
                "weights": weights,
                "tokens": [c.token_ids for c in done],
                "bytes": sum(local_tensor(p).nbytes for p in kept),
                "in_shards": one.policy.loaded_in_shards,
            }
        )
    return found


TWO: list[dict[str, Any]] = [{"dp": 2}, {"fsdp": 2, "activation_checkpointing": True}]


FOUR: list[dict[str, Any]] = [{"fsdp": 4}]


PRODUCTS: list[dict[str, Any]] = [
    {"dp": 2, "fsdp": 2},
    {"dp": 2, "fsdp": 2, "packing": True},
]


@pytest.mark.parametrize(
    ("family", "layouts"),
    and_slow(
        [("mixtral", FOUR)],
        [
            ("qwen3_moe", TWO),
            ("qwen3_moe", FOUR + PRODUCTS),
            ("mixtral", TWO),
            ("mixtral", PRODUCTS),
        ],
    ),
)
def test_experts_train_on_ranks_as_in_one_process(
    tmp_path: Path, family: str, layouts: list[dict[str, Any]]
) -> None:
    folder = save_family(family, tmp_path / "start")
    save_tokenizer(folder)
    [[alone]] = run_ranks(1, mixture_courses, str(folder), [{}], str(tmp_path / "one"))
    assert alone["in_shards"]
    assert alone["metrics"][0]["actor/router_aux_loss"] > 1.0  # with one expert a token: 1 is even
    every = run_ranks(world(layouts), mixture_courses, str(folder), layouts, str(tmp_path / "many"))
    one = load_state_dict(str(tmp_path / "one/0/model.safetensors"))
    assert any(".experts.1." in name for name in one)
    for number, parallel in enumerate(layouts):
        for rank in every:
            same_mixture_course(rank[number], alone)
            whole = sum(t.nbytes for t in alone["weights"].values())
            cut = parallel.get("fsdp", 1)
            assert cut == 1 or rank[number]["bytes"] == pytest.approx(whole / cut, rel=0.03)
        written = load_state_dict(str(tmp_path / f"many/{number}/model.safetensors"))
        assert written.keys() == one.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(written[name], tensor, rtol=1e-4, atol=1e-4)


def same_mixture_course(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["in_shards"]
    for mine, theirs in zip(found["metrics"], wanted["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-4, atol=1e-4)
    assert found["tokens"] == wanted["tokens"]


def world(layouts: list[dict[str, Any]]) -> int:
    sizes = {k: v for k, v in layouts[0].items() if not isinstance(v, bool)}
    return Layout(**sizes).world_size


def save_tokenizer(folder: Path) -> None:
    from engine.data.tokenizer import train_tokenizer

    train_tokenizer(["1+1=2", "2+2=4"], 300).save_pretrained(folder)


def first_half(folder: str, draft: str, parallel: dict[str, Any]) -> None:
    one = worker(folder, parallel, router_aux_loss_coef=0.5)
    train(one)
    one.save_state(draft)
    one.wait_saved()


def second_half(
    folder: str, saved: str, parallel: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    one = worker(folder, parallel, router_aux_loss_coef=0.5)
    if saved:
        one.load_state(saved)
    else:
        train(one)
    return train(one, MIXTURE_STEPS), {name: t.clone() for name, t in one.sharded.full_tensors()}


@pytest.mark.parametrize(
    ("family", "before", "after"),
    and_slow(
        [("mixtral", {"fsdp": 4, "offload_params": True}, {"fsdp": 2, "offload_params": True})],
        [("qwen3_moe", {"fsdp": 2}, {"fsdp": 4}), ("qwen3_moe", {"dp": 2}, {"fsdp": 2})],
    ),
)
def test_a_checkpoint_goes_on_in_another_layout(
    tmp_path: Path, family: str, before: dict[str, int], after: dict[str, int]
) -> None:
    folder = str(save_family(family, tmp_path / "start"))
    draft = CheckpointStore(tmp_path / "checkpoints")
    begun = draft.begin(MIXTURE_STEPS)
    begun.roles = {"actor": world([before])}
    run_ranks(world([before]), first_half, folder, begun.folder, before)
    saved = draft.commit(begun).folder
    [wanted] = run_ranks(1, second_half, folder, "", {})
    for metrics, weights in run_ranks(world([after]), second_half, folder, saved, after):
        for mine, theirs in zip(metrics, wanted[0], strict=True):
            assert mine == pytest.approx(theirs, rel=5e-4, abs=5e-5)
        for name, tensor in wanted[1].items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-4)


DISTILLATION_STEPS = 2


def distillation_course(
    folder: str, teachers: list[str], parallel: dict[str, int], top_k: int
) -> Any:
    """Steps with a teacher for each half of the rows: metrics, and the weights at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = ActorConfig.model_validate(
        {
            "use_kl_loss": False,
            "optim": {"lr": 1e-2, "grad_clip": 0.3, "warmup_ratio": 0.0},
            "max_tokens_per_micro_batch": 64,
            "parallel": parallel,
        }
    )
    given = [TeacherConfig(model=one, rows=name) for one, name in zip(teachers, "ab", strict=True)]
    own = {"loss": "jsd", "top_k": top_k, "teachers": given, "route_by": "side"}
    settings, layout = DistillationConfig.model_validate(own), Layout.of(config.parallel)
    actor = {"config": config, "temperature": 0.8, "total_steps": DISTILLATION_STEPS, "seed": 0}
    teacher = {
        "teachers": given,
        "settings": settings,
        "temperature": 0.8,
        "max_tokens_per_micro_batch": 64,
        "parallel": config.parallel,
    }
    same = {"model_path": folder}
    host = WorkerHost(
        [
            RoleSpec("actor", ActorWorker, same | actor | {"distillation": settings}, layout),
            RoleSpec("teacher", TeacherWorker, same | teacher, layout),
        ],
        rank,
        world,
        threads=1,
    )
    host.build()

    def call(role: str, method: str, batch: Batch) -> Any:
        every: list[Any] = [None] * world
        dist.all_gather_object(
            every, host.call(RemoteCall(role, method, (BatchArgument((1,)),)), batch)
        )
        return merge_results([result for result in every if result is not None])

    metrics = []
    for step in range(DISTILLATION_STEPS):
        batch = training_batch(6, seed=step)
        batch |= {"teacher_weights": torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(3, 1)}
        if top_k:
            batch |= call("teacher", "top_k", batch)
        metrics.append(call("actor", "update_distilled", batch))
    trained = host.workers["actor"]
    assert isinstance(trained, ActorWorker)
    weights = {name: tensor.clone() for name, tensor in trained.sharded.full_tensors()}
    return {"metrics": metrics, "weights": weights}


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize(
    "parallel", and_slow([{"fsdp": 2}], [{"dp": 2}, {"sp": 2}, {"fsdp": 2, "sp": 2}]), ids=str
)
def test_students_learn_as_on_one_rank(
    tmp_path_factory: pytest.TempPathFactory, parallel: dict[str, int], top_k: int
) -> None:
    root = tmp_path_factory.mktemp("distillation")
    folder = str(save_family("qwen2", root / "student"))
    teachers = [str(root / name) for name in ("a", "b")]
    for seed, one in enumerate(teachers, 1):
        tiny_model("qwen2", seed).save_pretrained(one)
    [alone] = run_ranks(1, distillation_course, folder, teachers, {}, top_k)
    assert all(metrics["actor/divergence"] > 0.1 for metrics in alone["metrics"])
    ranks = Layout(**parallel).world_size
    for result in run_ranks(ranks, distillation_course, folder, teachers, parallel, top_k):
        for step, wanted in enumerate(alone["metrics"]):
            assert result["metrics"][step] == pytest.approx(wanted, rel=2e-4, abs=2e-5)
        for name, tensor in alone["weights"].items():
            # A step of Adam moves a weight by lr=1e-2, however small its gradient is.
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-4, atol=5e-4)
