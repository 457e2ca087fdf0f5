"""What teachers say of completions, loaded or behind an address, and what a student makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import write_tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.algorithms.divergences import full_divergence
from engine.batch import Batch
from engine.config import ActorConfig, DistillationConfig, ModelConfig, TeacherConfig
from engine.data.collate import collate_completions
from engine.data.tokenizer import load_tokenizer
from engine.errors import RolloutError
from engine.models import save_model
from engine.serve import Identity
from engine.serve.api_server import ApiServer, ServerLimits
from engine.serve.native_backend import NativeBackend
from engine.workers.actor import ActorWorker
from engine.workers.frozen_models import TeacherWorker
from engine.workers.role import ProcessState, WorkerContext

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    dtype="float32",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A student and two teachers, of one tokenizer."""
    root = tmp_path_factory.mktemp("teachers")
    student = write_tiny_folder(root / "student", SHAPE)
    found = [student]
    for seed in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(student)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        save_model(model, load_tokenizer(student), root / f"teacher{seed}")
        found.append(root / f"teacher{seed}")
    return found


@pytest.fixture(scope="module")
def url(folders: list[Path]) -> Iterator[str]:
    """The first teacher behind engine.serve's native server."""
    server = ApiServer("127.0.0.1", 0, ServerLimits(request_timeout=120))
    server.backend = NativeBackend.load(folders[1], None)
    server.start(Identity("teacher", "models:/teacher@champion", "1", "d" * 64, "e" * 64))
    yield f"http://127.0.0.1:{server.server_port}"
    server.stop()


def completions() -> Batch:
    prompts = Batch({"group_ids": torch.arange(3)}, {"prompt_ids": [[5, 6, 7], [8], [9, 10]]})
    responses = [[11, 12, 13, 2], [14, 2], [15, 16, 17]]
    nothing = [[0.0] * len(ids) for ids in responses]
    return collate_completions(prompts, [0, 1, 2], responses, nothing, pad_token_id=0)


def weighted(*weights: list[float]) -> Batch:
    return completions() | {"teacher_weights": torch.tensor(weights)}


def teachers(
    student: Path, *given: TeacherConfig, process: ProcessState | None = None, **settings: Any
) -> TeacherWorker:
    return TeacherWorker(
        WorkerContext("teacher", process=process or ProcessState()),
        model_path=str(student),
        teachers=given,
        settings=DistillationConfig.model_validate({"teachers": given} | settings),
        temperature=1.0,
        max_tokens_per_micro_batch=64,
    )


def loaded(folder: Path, **settings: Any) -> TeacherConfig:
    return TeacherConfig(model=str(folder), **settings)


def expected_logits(folder: Path, batch: Batch) -> list[Tensor]:
    """`[n, V]` at each row's response tokens, a row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    found, width = [], batch["responses"].shape[1]
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        row, count = ids[mask], int(mask[-width:].sum())
        with torch.no_grad():
            found.append(model(row[None]).logits[0, len(row) - count - 1 : -1])
    return found


def test_log_probs_are_the_mean_by_weight(folders: list[Path]) -> None:
    batch = weighted([0.25, 0.75], [1.0, 0.0], [0.0, 1.0])
    worker = teachers(folders[0], loaded(folders[1]), loaded(folders[2]))
    got = worker.log_probs(batch)["ref_log_probs"]
    each = [expected_logits(folder, batch) for folder in folders[1:]]
    for row, weights in enumerate(batch["teacher_weights"].tolist()):
        mask = batch["response_mask"][row].bool()
        tokens = batch["responses"][row][mask, None]
        said = [one[row].log_softmax(-1).gather(1, tokens)[:, 0] for one in each]
        wanted = sum(w * one for w, one in zip(weights, said, strict=True))
        torch.testing.assert_close(got[row][mask], wanted, atol=1e-5, rtol=1e-5)
        assert (got[row][~mask] == 0).all()


def test_a_server_says_what_the_model_says(folders: list[Path], url: str) -> None:
    batch, served = weighted([1.0], [1.0], [1.0]), TeacherConfig(url=url)
    here = teachers(folders[0], loaded(folders[1]), loss="forward_kl", top_k=4)
    there = teachers(folders[0], served, loss="forward_kl", top_k=4)
    try:
        ours, theirs = (worker.log_probs(batch)["ref_log_probs"] for worker in (here, there))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        ours_k, theirs_k = here.top_k(batch), there.top_k(batch)
        inside = batch["response_mask"].bool()
        assert torch.equal(ours_k["teacher_ids"][inside], theirs_k["teacher_ids"][inside])
        torch.testing.assert_close(
            ours_k["teacher_log_probs"], theirs_k["teacher_log_probs"], atol=1e-4, rtol=1e-4
        )
    finally:
        there.close()


def test_a_row_asks_its_own_teacher(folders: list[Path], url: str) -> None:
    given = (loaded(folders[2], rows="a"), TeacherConfig(url=url, rows="b"))
    worker = teachers(folders[0], *given, loss="jsd", top_k=3, route_by="subject")
    try:
        got = worker.top_k(weighted([1.0, 0.0], [0.0, 1.0], [1.0, 0.0]))
    finally:
        worker.close()
    assert got["teacher_weights"].tolist() == [[1.0]] * 3
    for row, folder in enumerate((folders[2], folders[1], folders[2])):
        logits = expected_logits(folder, completions())[row]
        wanted = logits.log_softmax(-1).topk(3)
        assert torch.equal(got["teacher_ids"][row, : len(logits)].long(), wanted.indices)
        torch.testing.assert_close(
            got["teacher_log_probs"][row, : len(logits), :3], wanted.values, atol=1e-4, rtol=1e-4
        )


def student(folder: Path, process: ProcessState, **settings: Any) -> ActorWorker:
    return ActorWorker(
        WorkerContext("actor", process=process),
        model_path=str(folder),
        config=ActorConfig.model_validate(
            {"use_kl_loss": False, "optim": {"lr": 1e-3}, "max_tokens_per_micro_batch": 64}
        ),
        temperature=1.0,
        total_steps=10,
        seed=0,
        distillation=DistillationConfig.model_validate(settings),
    )


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jsd"])
def test_an_update_goes_down_the_divergence(folders: list[Path], loss: Any) -> None:
    """Of two teachers in one process by weight; the same with the whole vocabulary as top_k."""
    batch = weighted([0.25, 0.75], [0.5, 0.5], [0.0, 1.0])
    own = expected_logits(folders[0], batch)
    each = [expected_logits(folder, batch) for folder in folders[1:]]
    wanted, count = 0.0, 0
    for row, weights in enumerate(batch["teacher_weights"].tolist()):
        for weight, theirs in zip(weights, each, strict=True):
            wanted += weight * float(full_divergence(own[row], theirs[row], loss).sum())
        count += len(own[row])
    trained = []
    for top_k in (0, 10_000):
        process = ProcessState()
        settings = {"loss": loss, "top_k": top_k}
        actor = student(folders[0], process, **settings)
        given = [loaded(folder) for folder in folders[1:]]
        worker = teachers(folders[0], *given, process=process, **settings)
        asked = batch | (worker.top_k(batch) if top_k else {})
        course = [actor.update_distilled(asked)["actor/divergence"] for _ in range(5)]
        assert course[0] == pytest.approx(wanted / count, rel=1e-4)
        assert course[-1] < course[0]
        trained.append({n: p.detach() for n, p in actor.policy.module.named_parameters()})
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, atol=1e-5, rtol=1e-4)


def test_a_server_that_can_t_is_named(folders: list[Path], url: str) -> None:
    with pytest.raises(RolloutError, match=r"teachers\[0\].served_model='other' is not served"):
        teachers(folders[0], TeacherConfig(url=url, served_model="other"))
    worker = teachers(folders[0], TeacherConfig(url=url), loss="jsd", top_k=2000)
    worker.vocabulary = 5000  # as of a larger model: more than the server gives
    try:
        with pytest.raises(RolloutError, match=r"prompt_logprobs=.*--max-logprobs"):
            worker.top_k(weighted([1.0], [1.0], [1.0]))
    finally:
        worker.close()
