"""The actor on many ranks: every layout trains as one rank does. Real gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_models import CHANGES
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import save_family, training_batch, write_tiny_folder
from torch import Tensor

from engine.config import ActorConfig, LoRAConfig
from engine.controller.worker_host import shard_rows
from engine.models import load_model
from engine.parallel.layout import Layout
from engine.workers.actor import ActorWorker
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
    {"fsdp": 4, "activation_checkpointing": True, "offload_params": True},
    {"tp": 2, "sequence_parallel": False},
    {"fsdp": 2, "tp": 2, "offload_optimizer": True},
    {"pp": 2, "fsdp": 2},
    {"sp": 2, "tp": 2},
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
    sizes = {k: v for k, v in parallel.items() if not isinstance(v, bool)}
    same_course(run_ranks(Layout(**sizes).world_size, course, folder, parallel, {}), alone)


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
