"""A policy on ranks, under torchrun too."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from hybrid_cases import prompts
from thorough import and_slow
from tiny_engine import tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from engine import HybridActor, measure_switch_overhead
from engine.config import LoRAConfig
from engine.errors import EngineError, StorageError
from engine.models import add_adapters, load_model
from engine.rollout.protocol import SamplingParams

ROWS = 4


def own_rows(config: dict[str, Any], rank: int, world: int) -> slice:
    """The rows that this rank trains on: ranks that differ in tp have the same ones."""
    tp = config.get("train_tp_size", 1)
    shares = world // tp
    size = ROWS // shares
    return slice(rank // tp * size, (rank // tp + 1) * size)


def course(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Generate, take two steps on this rank's rows, one in two passes, and generate again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = own_rows(config, rank, world)
    actor = HybridActor(tiny_model(family), config)
    mine = {name: tensor[rows] for name, tensor in prompts(ROWS).items()}
    sampled = {"do_sample": True, "max_new_tokens": 4, "num_return_sequences": 2, "top_k": 0}
    torch.manual_seed(4 + rank)  # the first rank's draws count
    found = [actor.generate(**mine, max_new_tokens=5), actor.generate(**mine, **sampled)]
    actor.train()
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.3)
    whole, losses = prompts(ROWS)["input_ids"], []
    for passes in (1, 2):
        parts = whole[rows].chunk(passes)
        for ids in parts:
            loss = actor(input_ids=ids, labels=ids).loss / len(parts)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        found.append(actor.generate(**mine, max_new_tokens=5))
    (done,) = actor.rollout([[5, 6, 7]], SamplingParams(max_new_tokens=3))
    logits = actor(input_ids=whole[rows]).logits
    actor.eval()
    return {
        "rows": rows,
        "found": found,
        "loss": losses[0],
        "logits": logits.detach(),
        "version": (actor.policy_version, done.policy_version),
        "switch": measure_switch_overhead(actor, "rollout", repeats=1),
        "shared": shares_storage(actor),
    }


def shares_storage(actor: HybridActor) -> bool:
    """Whether rollout decodes with the very storage that is trained."""
    trained = [p.data for p in actor.parameters()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in trained]
    rollout = {p.data_ptr() for p in actor.engine._handle.get().parameters()}
    return {t.data_ptr() for t in local} == rollout


def joined(results: list[dict[str, Any]], name: str) -> torch.Tensor:
    """One of the ranks' results, in the order of rows, each once."""
    parts = {result["rows"].start: result[name] for result in results}
    return torch.cat([parts[start] for start in sorted(parts)])


CASES: list[tuple[int, dict[str, Any], bool]] = [
    (2, {"fsdp_size": 2, "rollout_tp_size": 2}, False),
    (2, {"train_tp_size": 2}, True),
    (2, {"fsdp_size": 2, "rollout_tp_size": 1}, False),
    (4, {"train_tp_size": 2, "fsdp_size": 2}, False),
]


MORE: list[tuple[int, dict[str, Any], bool]] = [
    (4, {"fsdp_sharding": "HYBRID_SHARD", "fsdp_size": 2, "rollout_tp_size": 1}, False),
    (2, {"train_tp_size": 2, "rollout_tp_size": 1}, False),
    (2, {"fsdp_sharding": "NO_SHARD"}, True),
    (4, {"train_tp_size": 2, "fsdp_sharding": "NO_SHARD"}, True),
]


@functools.cache
def alone(family: str) -> dict[str, Any]:
    return run_ranks(1, course, family, {})[0]


@pytest.mark.parametrize(
    ("family", "world", "config", "shared"),
    and_slow(
        [("qwen2", *case) for case in CASES],
        [("qwen2", *case) for case in MORE]
        + [("llama", *case) for case in (*CASES, *MORE) if case[0] == 2],
    ),
)
def test_ranks_generate_and_learn_what_one_rank_does(
    family: str, world: int, config: dict[str, Any], shared: bool
) -> None:
    wanted, results = alone(family), run_ranks(world, course, family, config)
    for call, tokens in enumerate(wanted["found"]):
        found = [result | {"call": result["found"][call]} for result in results]
        assert torch.equal(joined(found, "call"), tokens)
    assert torch.allclose(joined(results, "logits"), wanted["logits"], atol=2e-4)
    loss = torch.stack([result["loss"] for result in results]).mean()
    assert torch.allclose(loss, wanted["loss"], atol=1e-5)
    assert not torch.equal(wanted["found"][0], wanted["found"][3]), "training must be seen"
    for result in results:
        assert result["version"] == wanted["version"]
        assert result["shared"] == shared
        assert (result["switch"]["received_mb"] > 0) == (not shared)


def refusal(case: str) -> str:
    """The error that this rank gets."""
    rank = dist.get_rank()
    config: dict[str, Any] = {"train_tp_size": 2} if case == "rows" else {}
    model: Any = tiny_model("gpt2" if case == "family" else "qwen2")
    arguments: dict[str, Any] = {"max_new_tokens": 3}
    try:
        if case == "layout":
            config = {"train_tp_size": 3}
        elif case == "rollout":
            config = {"rollout_tp_size": 3}
        elif case == "adapters":
            add_adapters(model, LoRAConfig(rank=2), 0)
            config = {"rollout_tp_size": 2}
        elif case == "engine":
            HybridActor(model, {"rollout_tp_size": 2}, rollout_engine="vllm")
        elif case == "alone" and rank == 1:
            arguments["num_beams"] = 3
        elif case == "arguments":
            arguments["max_new_tokens"] = 3 + rank
        elif case == "vocabulary" and rank == 1:
            arguments["input_ids"] = torch.full((1, 4), 97)
        actor = HybridActor(model, config)
        if case == "closed" and rank == 0:
            actor.close()
        rows = {"input_ids": torch.tensor([[5, 6 + rank]])}
        actor.generate(**rows | arguments)
    except EngineError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("layout", ["but there are 2"] * 2),
        ("rollout", ["rollout_tp_size=3 needs 3 ranks, but there are 2"] * 2),
        ("family", ["can't be sharded over ranks"] * 2),
        ("adapters", ["would shard the policy's adapters"] * 2),
        ("engine", ["rollout_engine='vllm' decodes an actor's whole model"] * 2),
        ("alone", ["rank 1 of 2: generate can't take num_beams=3", ": generate can't take"]),
        ("arguments", ["same arguments on all ranks"] * 2),
        ("vocabulary", ["rank 1 of 2: prompt 0", "ModelError: prompt 0 has token id 97"]),
        ("rows", ["ranks 0 and 1 share their rows (tp_size=2)"] * 2),
        ("closed", ["RolloutError: the actor was closed", "rank 0 of 2: the actor was closed"]),
    ],
)
def test_what_can_t_be_is_refused_on_all_ranks(case: str, words: list[str]) -> None:
    for found, wanted in zip(run_ranks(2, refusal, case), words, strict=True):
        assert wanted in found


def saved_and_loaded(folder: str, config: dict[str, Any], adapters: bool) -> list[list[int]]:
    model = tiny_model("qwen2")
    if adapters:
        add_adapters(model, LoRAConfig(rank=4), 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B" in name:
                    torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    actor = HybridActor(model, config)
    step_ids = prompts(2)["input_ids"]
    optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=0.5)
    actor(input_ids=step_ids, labels=step_ids).loss.backward()
    optimizer.step()
    if not adapters:
        actor.save_pretrained(Path(folder) / "saved")
        other = HybridActor(tiny_model("qwen2", seed=3), config)
        other.load_state_dict(load_model(Path(folder) / "saved").state_dict())
        with pytest.raises(EngineError, match="another model") if config else nullcontext():
            other.load_state_dict({"x": torch.zeros(1)} if config else other.state_dict())
        kept = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(kept)
        return other.generate(**prompts(2), max_new_tokens=6).tolist()
    return actor.generate(**prompts(2), max_new_tokens=6).tolist()


@pytest.fixture(scope="module")
def loaded_alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return run_ranks(1, saved_and_loaded, str(tmp_path_factory.mktemp("one")), {}, False)[0]


@pytest.mark.parametrize(
    "config", [{"fsdp_size": 2}, {"train_tp_size": 2}, {"fsdp_sharding": "NO_SHARD"}]
)
def test_saved_weights_are_whole_and_can_be_loaded_anywhere(
    tmp_path: Path, config: dict[str, Any], loaded_alone: list[list[int]]
) -> None:
    wanted = loaded_alone
    for found in run_ranks(2, saved_and_loaded, str(tmp_path), config, False):
        assert found == wanted
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(plain) is Qwen2ForCausalLM
    assert plain.generate(**prompts(2), max_new_tokens=6).tolist() == wanted


def test_adapters_of_a_spread_policy_are_sampled_with() -> None:
    (wanted,) = run_ranks(1, saved_and_loaded, "", {}, True)
    assert run_ranks(2, saved_and_loaded, "", {"fsdp_size": 2}, True) == [wanted] * 2


def loaded_with_adapters(config: dict[str, Any]) -> list[list[int]]:
    """What is sampled after another base and other adapters were loaded."""
    policy, other = tiny_model("qwen2"), tiny_model("qwen2", seed=3)
    for model in (policy, other):
        add_adapters(model, LoRAConfig(rank=2), 0)
    actor = HybridActor(policy, config)
    before = actor.generate(**prompts(2), max_new_tokens=6).tolist()
    actor.load_state_dict(other.state_dict())
    after = actor.generate(**prompts(2), max_new_tokens=6).tolist()
    assert after != before
    return after


def test_a_base_that_is_loaded_under_adapters_is_sampled_with() -> None:
    (wanted,) = run_ranks(1, loaded_with_adapters, {})
    assert run_ranks(2, loaded_with_adapters, {"fsdp_size": 2}) == [wanted] * 2


def saved_over_a_file(file: str, config: dict[str, Any]) -> str:
    with pytest.raises(StorageError) as error:
        HybridActor(tiny_model("qwen2"), config).save_pretrained(file)
    return str(error.value)


def test_what_the_first_rank_can_t_write_is_an_error_of_all(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("mine")
    said = f"the model can't be written to {file}: it is a file; name a folder"
    assert run_ranks(1, saved_over_a_file, str(file), {}) == [said]
    found = run_ranks(2, saved_over_a_file, str(file), {"fsdp_size": 2})
    assert found == [said, f"rank 0 of 2: {said}"]
    assert file.read_text() == "mine"


ROOT = Path(__file__).parents[3]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def documented_program(folder: Path, saved: Path) -> str:
    text = (ROOT / "docs" / "hybrid-actor.md").read_text()
    (program,) = re.findall(r"```python\n(# train\.py\n.*?)```", text, flags=re.DOTALL)
    assert "path/to/model" in program
    assert "/tmp/hybrid-actor" in program
    return str(
        program.replace("path/to/model", str(folder)).replace("/tmp/hybrid-actor", str(saved))
    )


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout  # the lines of two ranks may mix


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_documented_program_learns(tiny_folder: Path, tmp_path: Path, ranks: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(documented_program(tiny_folder, tmp_path / "saved"))
    said = run(str(program)) if ranks == 1 else run(*TORCHRUN, str(ranks), str(program))
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]
    assert len(losses) == 3 * ranks
    assert min(losses[-ranks:]) < losses[0]
    assert (tmp_path / "saved" / "model.safetensors").is_file()
