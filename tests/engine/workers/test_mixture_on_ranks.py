"""A mixture of experts on several ranks trains as it does in one process. Real gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import save_family, training_batch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import load_state_dict

from engine.checkpoint import CheckpointStore
from engine.config import ActorConfig
from engine.controller.worker_host import shard_rows
from engine.models import load_model
from engine.parallel.layout import Layout
from engine.parallel.module_shards import local_tensor
from engine.rollout.native.engine import NativeEngine
from engine.rollout.protocol import SamplingParams
from engine.runtime.rollout_weights import rollout_weights
from engine.workers.actor import ActorWorker
from engine.workers.role import WorkerContext

ROWS, STEPS = 4, 2


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
        total_steps=2 * STEPS,
        seed=0,
    )


def train(one: ActorWorker, begin: int = 0) -> list[dict[str, float]]:
    share = one.context.layout.data_shard(one.context.rank)  # type: ignore[union-attr]
    batches = [training_batch(ROWS, seed=step) for step in range(begin, begin + STEPS)]
    return [one.update(shard_rows(batch, share)[0]) for batch in batches]


def courses(folder: str, layouts: list[dict[str, Any]], out: str) -> list[dict[str, Any]]:
    """Of each layout: two updates, the weights after, where they lie, and what rollout samples."""
    found = []
    for number, parallel in enumerate(layouts):
        one = worker(folder, parallel, router_aux_loss_coef=0.5)
        metrics = train(one)
        weights = {name: t.clone() for name, t in one.sharded.full_tensors()}
        served = rollout_weights(one.sharded, 1, lambda: load_model(folder))
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
    [[alone]] = run_ranks(1, courses, str(folder), [{}], str(tmp_path / "one"))
    assert alone["in_shards"]
    assert alone["metrics"][0]["actor/router_aux_loss"] > 1.0  # with one expert a token: 1 is even
    every = run_ranks(world(layouts), courses, str(folder), layouts, str(tmp_path / "many"))
    one = load_state_dict(str(tmp_path / "one/0/model.safetensors"))
    assert any(".experts.1." in name for name in one)
    for number, parallel in enumerate(layouts):
        for rank in every:
            same_course(rank[number], alone)
            whole = sum(t.nbytes for t in alone["weights"].values())
            cut = parallel.get("fsdp", 1)
            assert cut == 1 or rank[number]["bytes"] == pytest.approx(whole / cut, rel=0.03)
        written = load_state_dict(str(tmp_path / f"many/{number}/model.safetensors"))
        assert written.keys() == one.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(written[name], tensor, rtol=1e-4, atol=1e-4)


def same_course(found: dict[str, Any], wanted: dict[str, Any]) -> None:
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
    return train(one, STEPS), {name: t.clone() for name, t in one.sharded.full_tensors()}


@pytest.mark.parametrize(
    ("family", "before", "after"),
    and_slow(
        [("mixtral", {"fsdp": 4}, {"fsdp": 2})],
        [("qwen3_moe", {"fsdp": 2}, {"fsdp": 4}), ("qwen3_moe", {"dp": 2}, {"fsdp": 2})],
    ),
)
def test_a_checkpoint_goes_on_in_another_layout(
    tmp_path: Path, family: str, before: dict[str, int], after: dict[str, int]
) -> None:
    folder = str(save_family(family, tmp_path / "start"))
    draft = CheckpointStore(tmp_path / "checkpoints")
    begun = draft.begin(STEPS)
    begun.roles = {"actor": world([before])}
    run_ranks(world([before]), first_half, folder, begun.folder, before)
    saved = draft.commit(begun).folder
    [wanted] = run_ranks(1, second_half, folder, "", {})
    for metrics, weights in run_ranks(world([after]), second_half, folder, saved, after):
        for mine, theirs in zip(metrics, wanted[0], strict=True):
            assert mine == pytest.approx(theirs, rel=5e-4, abs=5e-5)
        for name, tensor in wanted[1].items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=2e-4)
