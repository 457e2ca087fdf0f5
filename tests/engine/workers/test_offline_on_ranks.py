"""SFT, pairs and preferences on ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from thorough import and_slow
from tiny_engine import random_completions, save_family, training_batch, write_tiny_folder
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from engine.batch import Batch
from engine.checkpoint import CheckpointStore
from engine.config import (
    ActorConfig,
    LoRAConfig,
    PreferenceTrainingConfig,
    RewardModelTrainingConfig,
    SFTConfig,
)
from engine.controller.worker_host import (
    BatchArgument,
    RemoteCall,
    RoleSpec,
    WorkerHost,
    merge_results,
    shard_rows,
)
from engine.data.training_examples import (
    LabelledExample,
    PairExample,
    collate_preferences,
    collate_scored,
    with_others,
)
from engine.models import load_model, load_policy_model
from engine.parallel.layout import Layout
from engine.runtime.policy_runtime import StartModel
from engine.trainers.offline import SFTExample, SFTTrainer, collate_examples, run_settings
from engine.workers.actor import ActorWorker
from engine.workers.frozen_models import ReferenceWorker
from engine.workers.role import WorkerContext
from engine.workers.supervised import PreferenceWorker, RewardModelWorker, SFTWorker

ROWS, STEPS = 10, 2


Case = tuple[dict[str, Any], LoRAConfig]  # a layout, with `sft.packing` where it counts; adapters


PLAIN, ADAPTERS = LoRAConfig(), LoRAConfig(rank=4)


TWO_RANKS: list[Case] = [
    ({"fsdp": 2, "activation_checkpointing": True}, PLAIN),
    ({"tp": 2}, PLAIN),
    ({"sp": 2}, PLAIN),
    ({"fsdp": 2}, ADAPTERS),
    ({"pp": 2, "packing": True}, PLAIN),
]


MORE_ON_TWO: list[Case] = [
    ({"dp": 2}, PLAIN),
    ({"pp": 2}, PLAIN),
    ({"sp": 2, "packing": True}, PLAIN),
]


FOUR_RANKS: list[Case] = [
    ({"dp": 2, "fsdp": 2}, PLAIN),
    ({"fsdp": 2, "tp": 2}, PLAIN),
    ({"dp": 2, "pp": 2}, PLAIN),
    ({"sp": 2, "tp": 2}, PLAIN),
    ({"dp": 4}, ADAPTERS),
    ({"pp": 2, "fsdp": 2}, ADAPTERS),
    ({"tp": 2, "dp": 2}, ADAPTERS),
]


def examples(rows: int, seed: int = 0) -> list[SFTExample]:
    return [SFTExample(p, r) for p, r in zip(*random_completions(rows, seed), strict=True)]


def settings(parallel: dict[str, Any], **changes: Any) -> SFTConfig:
    values = {
        "threads": 1,
        "train_batch_size": 4,
        "max_steps": 6,
        "max_tokens_per_micro_batch": 64,
        "optim": {"lr": 1e-2, "grad_clip": 0.3, "schedule": "cosine", "warmup_ratio": 0.3},
        "parallel": parallel,
    }
    return SFTConfig.model_validate(values | changes)


def worker(
    folder: str, parallel: dict[str, Any], lora: LoRAConfig = PLAIN, **changes: Any
) -> SFTWorker:
    layout = {name: size for name, size in parallel.items() if name != "packing"}
    config = settings(layout, packing=parallel.get("packing", "auto"), **changes)
    rank, world = dist.get_rank(), dist.get_world_size()
    context = WorkerContext("sft", rank, world, layout=Layout.of(config.parallel))
    one = SFTWorker(context, model=StartModel(folder, "float32", lora), config=config, seed=0)
    one.begin(6)
    return one


def step(one: SFTWorker, rows: list[SFTExample]) -> dict[str, float]:
    """An update, and the loss of some other rows after it."""
    assert one.context.layout is not None
    share = one.context.layout.data_shard(one.context.rank)

    def mine(some: list[SFTExample]) -> Any:
        return shard_rows(collate_examples(some, 0), share, pad=True)[0]

    return one.update(mine(rows)) | one.validation_loss(mine(examples(5, seed=9)))


def course(folder: str, case: Case) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Two updates, of rows that don't go into two; metrics, and the weights at the end, whole."""
    one = worker(folder, *case)
    rows = examples(ROWS)
    metrics = [step(one, rows[i : i + 4] if i else rows[:5]) for i in range(STEPS)]
    return metrics, {name: t.clone() for name, t in one.sharded.full_tensors()}


def courses(folder: str, cases: list[Case]) -> list[Any]:
    return [course(folder, case) for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("sft-ranks") / "model"))


@pytest.mark.parametrize(
    ("world", "cases"),
    and_slow([(2, TWO_RANKS)], [(2, MORE_ON_TWO), (4, FOUR_RANKS)]),
    ids=("two", "more on two", "four"),
)
def test_every_layout_trains_as_one_rank(folder: str, world: int, cases: list[Case]) -> None:
    plain, adapted = run_ranks(1, courses, folder, [({}, PLAIN), ({}, ADAPTERS)])[0]
    for rank in run_ranks(world, courses, folder, cases):
        for (layout, lora), (metrics, weights) in zip(cases, rank, strict=True):
            alone, whole = adapted if lora.rank else plain
            for found, wanted in zip(metrics, alone, strict=True):
                assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5), layout
            for name, tensor in whole.items():
                # An Adam step moves a weight by up to lr = 1e-2, whatever its gradient's size.
                torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-4)
    start = load_model(folder).state_dict()
    changed = [n for n, t in plain[1].items() if not torch.equal(t, start[n])]
    assert len(changed) > len(start) // 2


def ranks_begin(folder: str, draft: str, parallel: dict[str, Any], batches: list[Any]) -> None:
    one = worker(folder, parallel)
    for rows in batches:
        step(one, rows)
    one.save_state(draft)
    one.wait_saved()


def ranks_go_on(
    folder: str, saved: str, parallel: dict[str, Any], batches: list[Any]
) -> dict[str, Tensor]:
    one = worker(folder, parallel)
    one.load_state(saved)
    for rows in batches:
        step(one, rows)
    return {name: t.clone() for name, t in one.sharded.full_tensors()}


def test_it_goes_on_from_two_copies_in_one_process_and_then_on_two_shards(
    folder: str, tmp_path: Path, one_thread: None
) -> None:
    rows = examples(ROWS)

    def trainer(**changes: Any) -> SFTTrainer:
        return SFTTrainer(StartModel(folder, "float32"), 0, settings({}, **changes), seed=0)

    whole = trainer()
    whole.fit(rows, [])
    batches = [[rows[i] for i in batch] for batch in whole._batches(rows, 6)]
    store = CheckpointStore(tmp_path / "run")
    draft = store.begin(2)
    draft.roles = {"sft": 2}
    run_ranks(2, ranks_begin, folder, draft.folder, {"dp": 2}, batches[:2])
    draft.state = {
        "settings": run_settings(whole.config, whole.seed, whole.start, len(rows)),
        "metrics": {},
    }
    store.commit(draft)

    alone = trainer(save_freq=2, max_checkpoints_to_keep=3)
    steps: list[int] = []
    alone.on_step = lambda step, total, metrics: steps.append(step)
    alone.fit(rows, [], tmp_path / "run")
    assert steps == [3, 4, 5, 6]
    saved = str(tmp_path / "run" / "step_4")
    results = run_ranks(2, ranks_go_on, folder, saved, {"fsdp": 2}, batches[4:])
    wanted = whole.model.state_dict()
    for weights in (alone.model.state_dict(), *results):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=2e-4)


def saved_folder(folder: str, case: Case, out: str) -> None:
    # SGD: Adam divides by a gradient's size, also where that is all rounding.
    one = worker(folder, *case, optim={"optimizer": "SGD", "lr": 1.0})
    step(one, examples(ROWS))
    one.save(out, folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", [TWO_RANKS[0], MORE_ON_TWO[1], TWO_RANKS[3]])
def test_ranks_write_the_folder_that_one_rank_does(folder: str, tmp_path: Path, case: Case) -> None:
    run_ranks(1, saved_folder, folder, ({}, case[1]), str(tmp_path / "one"))
    run_ranks(2, saved_folder, folder, case, str(tmp_path / "two"))
    one, two = (load_model(tmp_path / name).state_dict() for name in ("one", "two"))
    assert one.keys() == two.keys()
    start = load_model(folder).state_dict()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)
    assert max((tensor - start[name]).abs().max() for name, tensor in one.items()) > 1e-3
    if case[1].rank:
        again = load_policy_model(
            tmp_path / "two" / "adapter", "float32", LoRAConfig(from_folder=True)
        )
        assert any(".lora_" in name for name in again.state_dict())


PAIR_STEPS = 2


def pairs_course(folder: str, parallel: dict[str, int], pairs: int) -> dict[str, Any]:
    """Steps on `pairs` pairs each: what the controller gets, and the weights at the end, whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = ActorConfig.model_validate(
        {
            "use_kl_loss": False,
            "optim": {"lr": 1e-2, "grad_clip": 0.3, "warmup_ratio": 0.0},
            "max_tokens_per_micro_batch": 64,
            "parallel": parallel,
        }
    )
    layout = Layout.of(config.parallel)
    actor = {"config": config, "temperature": 0.8, "total_steps": PAIR_STEPS, "seed": 0}
    reference = {
        "temperature": 1.3,  # not the actor's: equal log-probs would leave metrics to rounding
        "max_tokens_per_micro_batch": 64,
        "parallel": config.parallel,
    }
    host = WorkerHost(
        [
            RoleSpec("actor", ActorWorker, {"model_path": folder, **actor}, layout),
            RoleSpec("reference", ReferenceWorker, {"model_path": folder, **reference}, layout),
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
    for step in range(PAIR_STEPS):
        batch = training_batch(2 * pairs, seed=step)
        batch |= call("reference", "log_probs", batch)
        metrics.append(call("actor", "update_pairs", batch))
    trained = host.workers["actor"]
    assert isinstance(trained, ActorWorker)
    weights = {name: tensor.clone() for name, tensor in trained.sharded.full_tensors()}
    return {"metrics": metrics, "weights": weights}


@pytest.mark.parametrize(
    ("parallel", "pairs"),
    and_slow(
        [({"dp": 2}, 3), ({"fsdp": 2}, 1)],
        [
            ({"dp": 2}, 1),
            ({"fsdp": 2}, 3),
            *product([{"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"fsdp": 4}], [3, 1]),
        ],
    ),
    ids=str,
)
def test_pairs_train_as_on_one_rank(
    tmp_path_factory: pytest.TempPathFactory, parallel: dict[str, int], pairs: int
) -> None:
    """Neither parted pairs nor padding: the loss is the mean over the real pairs of all ranks."""
    folder = str(save_family("qwen2", tmp_path_factory.mktemp("pairs")))
    [alone] = run_ranks(1, pairs_course, folder, {}, pairs)
    for result in run_ranks(Layout(**parallel).world_size, pairs_course, folder, parallel, pairs):
        for step, wanted in enumerate(alone["metrics"]):
            assert result["metrics"][step] == pytest.approx(wanted, rel=2e-4, abs=2e-5)
        for name, tensor in alone["weights"].items():
            # A step of Adam moves a weight by lr=1e-2, however small its gradient is.
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-4, atol=5e-4)


PreferenceCase = tuple[str, dict[str, Any]]  # what is trained, and its layout


PREFERENCE_STEPS = 2


PREFERENCES_ON_TWO: list[PreferenceCase] = [
    ("kto", {"fsdp": 2}),
    ("sigmoid", {"tp": 2}),
    ("adapters", {"fsdp": 2}),
    ("reward_model", {"fsdp": 2}),
    ("reward_model", {"tp": 2}),
    ("likelihood adapters", {"fsdp": 2}),
]


MORE_PREFERENCES_ON_TWO: list[PreferenceCase] = [("sigmoid", {"dp": 2}), ("likelihood", {"tp": 2})]


PREFERENCES_ON_FOUR: list[PreferenceCase] = [
    ("kto", {"dp": 2, "pp": 2}),
    ("sigmoid", {"sp": 2, "dp": 2}),
    ("adapters", {"dp": 4}),
    ("reward_model", {"fsdp": 2, "tp": 2}),
    ("reward_model", {"pp": 2, "dp": 2}),
    ("likelihood", {"pp": 2, "dp": 2}),
    ("likelihood", {"fsdp": 2, "tp": 2}),
]


OPTIM = {"lr": 1e-2, "grad_clip": 0.3, "warmup_ratio": 0.0}


def batch_of(method: str, rows: int, seed: int) -> Batch:
    prompts, one = random_completions(rows, seed)
    _, two = random_completions(rows, seed + 50)
    if method == "kto":
        every = zip(prompts, one, strict=True)
        labelled = [LabelledExample(p, r, i % 3 > 0) for i, (p, r) in enumerate(every)]
        return collate_preferences(with_others(labelled), 0)
    pairs = [PairExample(*ids, margin=0.1) for ids in zip(prompts, one, two, strict=True)]
    return collate_scored(pairs, 0) if method == "reward_model" else collate_preferences(pairs, 0)


def preference_course(
    preference_folder: str, case: PreferenceCase, out: str = ""
) -> tuple[list[dict[str, float]], Any]:
    """Two updates of pairs that don't go into two; metrics, and the weights at the end, whole."""
    method, parallel = case
    values = {"parallel": parallel, "optim": OPTIM, "max_tokens_per_micro_batch": 64}
    lora = LoRAConfig(rank=4 if "adapters" in method else 0)
    start = StartModel(preference_folder, "float32", lora)
    layout = Layout(**parallel)
    context = WorkerContext("preference", dist.get_rank(), dist.get_world_size(), layout=layout)
    worker: PreferenceWorker | RewardModelWorker
    if method == "reward_model":
        config = RewardModelTrainingConfig.model_validate(values)
        worker = RewardModelWorker(context, model=start, config=config, seed=0)
    else:
        own: dict[str, Any] = {"loss": "kto" if method == "kto" else "sigmoid"}
        own |= {"reference": "live", "beta": 0.3}
        if "likelihood" in method:  # as LikelihoodRewardTrainer
            own = {"loss": "likelihood", "sft_weight": 1.0}
        policy = PreferenceTrainingConfig.model_validate(values | own)
        worker = PreferenceWorker(context, model=start, config=policy, seed=0)
    worker.begin(PREFERENCE_STEPS)
    share = layout.data_shard(context.rank)
    metrics = [
        worker.update(shard_rows(batch_of(method, 5 - step, step), share, unit=2, pad=True)[0])
        for step in range(PREFERENCE_STEPS)
    ]
    weights = {name: tensor.clone() for name, tensor in worker.sharded.full_tensors()}
    if out:
        worker.save(out, preference_folder)
    return metrics, weights


def preference_courses(preference_folder: str, cases: list[PreferenceCase]) -> list[Any]:
    return [preference_course(preference_folder, case) for case in cases]


@pytest.fixture(scope="module")
def preference_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("preference-ranks") / "model"))


@pytest.mark.parametrize(
    ("world", "cases"),
    and_slow([(2, PREFERENCES_ON_TWO)], [(2, MORE_PREFERENCES_ON_TWO), (4, PREFERENCES_ON_FOUR)]),
    ids=("two", "more on two", "four"),
)
def test_every_layout_learns_preferences_as_one_rank(
    preference_folder: str, world: int, cases: list[PreferenceCase]
) -> None:
    methods = sorted({method for method, _ in cases})
    [courses_alone] = run_ranks(
        1, preference_courses, preference_folder, [(method, {}) for method in methods]
    )
    alone = dict(zip(methods, courses_alone, strict=True))
    for rank in run_ranks(world, preference_courses, preference_folder, cases):
        for case, (metrics, weights) in zip(cases, rank, strict=True):
            wanted, whole = alone[case[0]]
            for found, one in zip(metrics, wanted, strict=True):
                if abs(one.get("rewards/margins", 1.0)) < 1e-6:
                    # Before the first step policy and reference are equal but for rounding, which
                    # decides the pairs' order.
                    found, one = (x | {"rewards/accuracies": 0.0} for x in (found, one))
                assert found == pytest.approx(one, rel=2e-3, abs=2e-5), case
            for name, tensor in whole.items():
                # An Adam step moves a weight by up to lr = 1e-2, whatever its gradient's size.
                torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=5e-4)


@pytest.mark.slow
def test_two_ranks_write_the_reward_model_that_one_does(
    preference_folder: str, tmp_path: Path
) -> None:
    saved: list[dict[str, Tensor]] = []
    for world, parallel in ((1, {}), (2, {"fsdp": 2})):
        out = str(tmp_path / str(world))
        run_ranks(world, preference_course, preference_folder, ("reward_model", parallel), out)
        saved.append(AutoModelForSequenceClassification.from_pretrained(out).state_dict())
    assert saved[0].keys() == saved[1].keys()
    assert saved[0]["score.weight"].abs().sum() > 0
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-3, atol=5e-4)
