"""A role that was loaded continues bit for bit like one that was never stopped."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import TINY_MODEL, save_family, training_batch, write_tiny_folder

from engine.batch import Batch
from engine.checkpoint import Checkpoint, CheckpointStore
from engine.config import ActorConfig, CriticConfig, RolloutConfig
from engine.data.collate import collate_prompts
from engine.errors import CheckpointError, DamagedCheckpointError
from engine.workers.actor import ActorWorker
from engine.workers.critic import CriticWorker
from engine.workers.role import StatefulWorker, WorkerContext
from engine.workers.rollout_worker import RolloutWorker

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIM = {"lr": 1e-2, "warmup_ratio": 0.3, "schedule": "cosine"}
SHUFFLED = {"optim": OPTIM, "ppo_mini_batch_size": 4, "ppo_epochs": 2}
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen2", tmp_path_factory.mktemp("state"))


def actor(folder: Path, **place: Any) -> ActorWorker:
    config = ActorConfig.model_validate(SHUFFLED | {"use_kl_loss": True})
    return ActorWorker(
        WorkerContext("actor", **place),
        model_path=str(folder),
        config=config,
        temperature=1.0,
        total_steps=6 * STEPS,
        seed=3,
    )


def critic(folder: Path) -> CriticWorker:
    config = CriticConfig.model_validate(SHUFFLED)
    context = WorkerContext("critic")
    return CriticWorker(
        context, model_path=str(folder), config=config, total_steps=6 * STEPS, seed=3
    )


ROLES = {"actor": actor, "critic": critic}
BATCHES = [training_batch(12, seed=step) for step in range(STEPS)]


def steps(worker: Any, batches: list[Batch]) -> list[dict[str, float]]:
    return [worker.update(batch) for batch in batches]


def saved(worker: StatefulWorker, root: Path, step: int = 2) -> Checkpoint:
    store = CheckpointStore(root)
    draft = store.begin(step)
    worker.save_state(draft.folder)
    worker.wait_saved()
    return store.commit(draft)


def assert_same_state(one: Any, other: Any, path: str = "state") -> None:
    """Bit for bit, whatever the state is made of."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same_state(one[key], other[key], f"{path}.{key}")
    else:
        assert one == other, path


@pytest.mark.parametrize("role", ROLES)
def test_a_loaded_role_goes_on_bit_for_bit(role: str, folder: Path, tmp_path: Path) -> None:
    whole = ROLES[role](folder)
    wanted = steps(whole, BATCHES)
    first = ROLES[role](folder)
    assert steps(first, BATCHES[:2]) == wanted[:2]
    found = saved(first, tmp_path)
    second = ROLES[role](folder)
    second.update(BATCHES[4])  # what was there before must leave no trace
    second.load_state(found.folder)
    assert_same_state(second.state_dict(), first.state_dict())
    assert steps(second, BATCHES[2:]) == wanted[2:]
    assert_same_state(second.state_dict(), whole.state_dict())
    moments = second.train_state.optimizer.state_dict()["moments"]
    assert len(moments) == len(list(second.sharded.module.parameters()))
    assert all(bool(m["exp_avg_sq"].any()) for name, m in moments.items() if "v_proj.w" in name)


RESUMED = """
import sys, torch
torch.set_num_threads(1)
import test_worker_state as tests
from pathlib import Path
results = {}
for role in tests.ROLES:
    worker = tests.ROLES[role](Path(sys.argv[1]))
    worker.load_state(sys.argv[2])
    results[role] = (tests.steps(worker, tests.BATCHES[2:]), worker.state_dict())
torch.save(results, sys.argv[3])
"""


@pytest.mark.slow
def test_another_process_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    workers = {role: make(folder) for role, make in ROLES.items()}
    store = CheckpointStore(tmp_path / "root")
    draft = store.begin(2)
    for worker in workers.values():
        steps(worker, BATCHES[:2])
        worker.save_state(draft.folder)
        worker.wait_saved()
    found = store.commit(draft)
    paths = [str(Path(__file__).parent), os.environ["PYTHONPATH"]]
    out = tmp_path / "out.pt"
    subprocess.run(
        [sys.executable, "-c", RESUMED, str(folder), found.folder, str(out)],
        check=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    results = torch.load(out, weights_only=True)
    for role, worker in workers.items():
        assert results[role][0] == steps(worker, BATCHES[2:])
        assert_same_state(results[role][1], worker.state_dict())


def test_updates_during_the_write_are_not_in_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    worker = actor(folder)
    worker.update(BATCHES[0])
    before = {k: v.detach().clone() for k, v in worker.state_dict()["model"].items()}
    store = CheckpointStore(tmp_path)
    draft = store.begin(1)
    worker.save_state(draft.folder)
    steps(worker, BATCHES[1:3])
    worker.wait_saved()
    loaded = actor(folder)
    found = store.commit(draft)
    loaded.load_state(found.folder)
    assert_same_state({k: v.detach() for k, v in loaded.state_dict()["model"].items()}, before)
    assert loaded.context.process.policy.version == 1


def test_loading_keeps_the_storage_that_engines_share(folder: Path, tmp_path: Path) -> None:
    worker = actor(folder)
    worker.update(BATCHES[0])
    found = saved(worker, tmp_path)
    places = [p.data_ptr() for p in worker.sharded.module.parameters()]
    worker.update(BATCHES[1])
    worker.load_state(found.folder)
    assert [p.data_ptr() for p in worker.sharded.module.parameters()] == places
    tied = worker.sharded.module
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    files = [path.name for path in Path(found.folder).iterdir()]
    model = next(name for name in files if ".model." in name)
    parameters = sum(p.numel() for p in tied.parameters())
    assert (Path(found.folder) / model).stat().st_size < 4 * parameters + 10_000  # tied ones once


def test_process_generators_are_restored(folder: Path, tmp_path: Path) -> None:
    worker = critic(folder)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    random.gauss(0, 1), np.random.standard_normal(), torch.rand(3)
    found = saved(worker, tmp_path)

    def draw() -> list[float]:
        normal = float(np.random.standard_normal())
        return [random.gauss(0, 1), random.random(), normal, float(torch.rand(()))]

    wanted = draw()
    assert draw() != wanted
    worker.load_state(found.folder)
    assert draw() == wanted


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    found = saved(actor(folder), tmp_path / "root")
    other = actor(save_family("llama", tmp_path / "llama"))
    before = [p.detach().clone() for p in other.sharded.module.parameters()]
    with pytest.raises(
        CheckpointError,
        match=r"step_2: actor-00000-of-00001: .*another model: 'lm_head\.weight' is missing there "
        r"and float32 \[97, 32\] here; resume with the model",
    ):
        other.load_state(found.folder)
    assert all(map(torch.equal, before, other.sharded.module.parameters()))
    wide = critic(folder)
    with pytest.raises(CheckpointError, match=r"has no state of role 'critic'; resume with"):
        wide.load_state(found.folder)


def test_moments_of_another_model_are_refused_and_change_nothing(folder: Path) -> None:
    worker = actor(folder)
    worker.update(BATCHES[0])
    before = worker.train_state.optimizer.state_dict()
    other = critic(folder)
    other.update(BATCHES[0])
    with pytest.raises(CheckpointError, match=r"for 'backbone\..*no such parameter; resume with"):
        worker.train_state.optimizer.load_state_dict(other.train_state.optimizer.state_dict())
    assert_same_state(worker.train_state.optimizer.state_dict(), before)


def test_a_damaged_file_is_refused(folder: Path, tmp_path: Path) -> None:
    found = saved(actor(folder), tmp_path)
    model = next(Path(found.folder).glob("*.model.safetensors"))
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=rf"{model.name} differs from its checksum"):
        actor(folder).load_state(found.folder)
    (Path(found.folder) / "COMPLETE").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"COMPLETE is missing"):
        actor(folder).load_state(found.folder)


def test_a_failed_write_surfaces_once_and_the_next_works(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = actor(folder)
    with caplog.at_level(logging.WARNING):
        worker.save_state(str(tmp_path / "nowhere"))
        with pytest.raises(CheckpointError, match=r"nowhere/actor.*all nodes must see one folder"):
            worker.save_state(str(tmp_path))
    assert "actor rank 0: writing its state failed" in caplog.text
    assert saved(worker, tmp_path).step == 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("sampling") / "model")


def sampling(tiny: Path) -> tuple[ActorWorker, RolloutWorker]:
    lead = actor(tiny)
    rollout = RolloutWorker(
        WorkerContext("rollout", process=lead.context.process),
        model_path=str(tiny),
        config=RolloutConfig(n=2, max_num_seqs=8),
        max_response_length=6,
        max_model_len=TINY_MODEL.max_position_embeddings,
        seed=1,
    )
    return lead, rollout


def test_the_rollout_draws_what_it_would_have_drawn(tiny: Path, tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "reward_model": {"ground_truth": "1"}} for i in range(3)]
    prompts = collate_prompts(rows, [[5, 6, 7], [8, 9], [10]])
    lead, rollout = sampling(tiny)
    lead.update(BATCHES[0])
    rollout.generate(prompts)
    store = CheckpointStore(tmp_path)
    draft = store.begin(1)
    for worker in (lead, rollout):
        worker.save_state(draft.folder)
        worker.wait_saved()
    wanted = rollout.generate(prompts)
    new_lead, new_rollout = sampling(tiny)
    # As many updates on other data: only an engine that is notified drops what it has cached.
    new_lead.update(BATCHES[3])
    new_rollout.generate(prompts)
    found = store.commit(draft)
    new_lead.load_state(found.folder)
    new_rollout.load_state(found.folder)
    got = new_rollout.generate(prompts)
    assert torch.equal(got["responses"], wanted["responses"])
    assert torch.equal(got["rollout_log_probs"], wanted["rollout_log_probs"])
    assert got["policy_version"].tolist() == [1] * 6
    for worker in (rollout, new_rollout):
        worker.close()
