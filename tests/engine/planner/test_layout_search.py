"""The search for layouts, resources, and the command."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.controller.placement import ClusterNode
from engine.errors import ConfigError, EngineError, PlacementError
from engine.parallel.layout import Layout, ModelShape, check_layout, rollout_layout
from engine.planner import (
    Cluster,
    FixedSettings,
    Machine,
    PlacementPlan,
    Workload,
    explain,
    read_cluster,
    search,
)
from engine.planner.__main__ import main
from engine.planner.memory import RUNTIME, estimate, usable_bytes
from engine.planner.resources import GIB, cluster_of, gpu_memory_here

SHAPE = ModelShape(4, 4, 2, 16, 64, 128, 1000)  # of a toy; real ones are below


QWEN_7B = ModelShape(28, 28, 4, 128, 3584, 18944, 152064)


QWEN_05B = ModelShape(24, 14, 2, 64, 896, 4864, 151936, tied=True)


GRPO_7B = Workload(QWEN_7B, 128, 8, 512, 512, compute_bytes=2.0, reference=True, passes=1)


def gpus(count: int, gib: float, machines: int = 1, host_gib: float = 2000) -> Cluster:
    return Cluster(
        tuple(
            Machine(f"m{i}", 64.0, int(host_gib * GIB), count, int(gib * GIB), "H100")
            for i in range(machines)
        )
    )


def cores(count: float, gib: float, machines: int = 1) -> Cluster:
    return Cluster(tuple(Machine(f"m{i}", count, int(gib * GIB)) for i in range(machines)))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    kv = draw(st.sampled_from([1, 2, 4]))
    shape = ModelShape(
        layers=draw(st.integers(1, 48)),
        heads=kv * draw(st.sampled_from([1, 2, 3, 7])),
        kv_heads=kv,
        head_dim=draw(st.sampled_from([16, 64, 128])),
        hidden=draw(st.sampled_from([64, 896, 4096])),
        intermediate=draw(st.sampled_from([96, 4864, 11008])),
        vocab=draw(st.sampled_from([300, 32000, 152064])),
        tied=draw(st.booleans()),
    )
    return Workload(
        shape,
        prompts=draw(st.integers(1, 256)),
        completions=draw(st.integers(1, 16)),
        prompt_length=draw(st.integers(1, 2048)),
        response_length=draw(st.integers(1, 8192)),
        compute_bytes=draw(st.sampled_from([2.0, 4.0])),
        adapters=draw(st.sampled_from([0, 100_000])),
        reference=draw(st.booleans()),
        critic=draw(st.sampled_from(["", "as actor"])),
        updates=draw(st.integers(1, 4)),
        families=draw(st.booleans()),
        cuts_sequences=draw(st.booleans()),
    )


clusters = st.one_of(
    st.builds(gpus, st.sampled_from([1, 2, 3, 4]), st.floats(4, 200), st.integers(1, 2)),
    st.builds(cores, st.integers(1, 64), st.floats(2, 600), st.integers(1, 4)),
)


few = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a search of hundreds of layouts each


def tried(
    work: Workload, cluster: Cluster, fixed: FixedSettings | None = None
) -> PlacementPlan | str:
    """The plan, or the sentence that says why there is none."""
    try:
        return search(work, cluster, fixed)
    except EngineError as error:
        return str(error)


@few
@given(workloads(), clusters)
def test_the_choice_is_valid_and_fits_by_its_own_estimate(work: Workload, cluster: Cluster) -> None:
    plan = tried(work, cluster)
    if isinstance(plan, str):
        assert "GiB too few" in plan
        assert "\n" not in plan
        return
    for one in (plan.chosen, *plan.others):
        layout, allocation = one.candidate.layout, one.allocation
        assert layout.world_size == allocation.ranks <= (cluster.gpus or len(cluster.machines))
        check_layout(layout, allocation.ranks, work.shape)
        assert rollout_layout(layout, tp=one.candidate.rollout_tp).tp == one.candidate.rollout_tp
        assert layout.data_ranks <= work.rows
        assert work.families or layout.tp * layout.pp == 1
        assert work.cuts_sequences or layout.sp == 1
        again = estimate(one.work, one.candidate, gpu=allocation.gpus > 0)
        assert again.peak <= usable_bytes(allocation.memory)
        assert again.host <= usable_bytes(allocation.host_memory)
        assert one.price.total >= plan.chosen.price.total
    for one in plan.too_large:
        assert one.excess_bytes > 0
        assert one.price.total < plan.chosen.price.total
    assert str(plan.chosen.candidate.layout) in explain(plan)


@few
@given(workloads(), clusters, st.floats(1.0, 8.0))
def test_more_memory_never_gives_a_worse_price(
    work: Workload, cluster: Cluster, times: float
) -> None:
    larger = Cluster(
        tuple(
            replace(m, memory=int(m.memory * times), gpu_memory=int(m.gpu_memory * times))
            for m in cluster.machines
        )
    )
    before, after = tried(work, cluster), tried(work, larger)
    if isinstance(before, PlacementPlan):
        assert isinstance(after, PlacementPlan)
        assert after.chosen.price.total <= before.chosen.price.total


@few
@given(workloads(), st.sampled_from(["dp", "fsdp", "tp", "pp", "sp"]), st.sampled_from([512, 4096]))
def test_what_the_user_has_set_stays(work: Workload, axis: str, tokens: int) -> None:
    fixed = FixedSettings({axis: 2}, tokens=tokens, activation_checkpointing=True)
    plan = tried(work, gpus(4, 150), fixed)
    if isinstance(plan, str):
        assert f"{axis}=2" in plan
        return
    for one in (plan.chosen, *plan.others):
        assert getattr(one.candidate.layout, axis) == 2
        assert one.candidate.tokens == tokens
        assert one.candidate.activation_checkpointing


def test_a_laptop_is_one_rank_with_all_its_cores() -> None:
    tiny = Workload(SHAPE, 16, 4, 24, 16, reference=True)
    chosen = search(tiny, cores(2, 6)).chosen
    assert (chosen.candidate.layout, chosen.allocation.cpus) == (Layout(), 2.0)
    assert chosen.candidate.tokens == 16384  # as without a plan
    assert not chosen.candidate.activation_checkpointing


def test_what_does_not_fit_one_device_is_spread_over_several() -> None:
    alone = estimate(GRPO_7B, search(GRPO_7B, gpus(1, 500)).chosen.candidate, gpu=True)
    assert alone.peak > 80 * GIB
    chosen = search(GRPO_7B, gpus(8, 80)).chosen
    assert chosen.allocation.ranks == 8
    assert chosen.candidate.layout.tp * chosen.candidate.shards * chosen.candidate.layout.pp > 1


def test_70b_on_sixteen_machines_of_eight_is_planned_in_time() -> None:
    shape = ModelShape(80, 64, 8, 128, 8192, 28672, 128256)
    work = Workload(shape, 128, 8, 512, 512, 2.0, compute_bytes=2.0, reference=True, passes=1)
    begin = time.process_time()
    plan = search(work, gpus(8, 80, machines=16, host_gib=1024))
    assert time.process_time() - begin < 10
    assert plan.chosen.allocation.ranks >= 32
    said = explain(plan)
    assert "too large in training" in said
    lost = [line for line in said.splitlines() if " s to " in line or " GiB in " in line]
    assert len(lost) >= 4


def test_what_talks_in_every_layer_stays_on_a_machine() -> None:
    plan = search(GRPO_7B, gpus(4, 80, machines=2))
    for one in (plan.chosen, *plan.others):
        layout = one.candidate.layout
        assert layout.tp * layout.sp <= 4
        assert one.candidate.rollout_tp <= 4


def test_recomputation_and_small_micro_batches_come_with_little_memory() -> None:
    long = replace(GRPO_7B, shape=QWEN_05B, response_length=7680, decode_rows=16)
    roomy, tight = search(long, gpus(1, 900)).chosen, search(long, gpus(1, 20)).chosen
    assert not roomy.candidate.activation_checkpointing
    assert tight.candidate.activation_checkpointing
    assert tight.candidate.tokens <= roomy.candidate.tokens
    assert tight.price.total > roomy.price.total


def test_nothing_fits_names_what_is_missing() -> None:
    with pytest.raises(PlacementError, match=r"there are 8.00 GiB, \S+ GiB too few") as error:
        search(GRPO_7B, gpus(1, 8))
    need = float(str(error.value).split("needs ")[1].split()[0])
    assert search(GRPO_7B, gpus(1, need + 0.02)).chosen.allocation.ranks == 1


def test_a_quantised_base_counts_on_each_rank_and_a_refusal_says_so() -> None:
    base = {"adapters": 10**7, "quantized": True, "base_bytes": 0.52}
    with pytest.raises(PlacementError, match=r"model\.lora\.quantize is whole on each rank"):
        search(replace(GRPO_7B, **base), gpus(8, 4))
    assert search(replace(GRPO_7B, **base), gpus(8, 40)).chosen.fits


def test_vllm_s_share_of_a_gpu_is_left_to_it() -> None:
    work, cluster = replace(GRPO_7B, memory_share=0.5, sleeps=True), gpus(8, 80)
    chosen = search(work, cluster).chosen
    memory, taken = chosen.memory, 0.5 * cluster.machines[0].gpu_memory
    assert memory.rollout + memory.cache == pytest.approx(taken)
    assert memory.sampling == pytest.approx(memory.weights + memory.moments + taken)
    assert memory.awake == 0, "it sleeps while the policy is trained"
    kept = search(replace(work, stays_awake=True), cluster).chosen.memory
    assert kept.training >= kept.weights + kept.moments + kept.gradients + taken
    with pytest.raises(PlacementError, match=r"lower rollout.vllm.gpu_memory_utilization=0.95"):
        search(replace(work, memory_share=0.95), cluster, FixedSettings(rollout_memory=True))
    opened = search(replace(work, memory_share=0.95), cluster).chosen
    assert opened.fits
    assert opened.work.memory_share < 0.95
    ahead = replace(work, memory_share=0.95, runs_ahead=True)  # vLLM has GPUs of its own
    assert search(ahead, cluster).chosen.memory.cache < taken


def test_memory_of_the_machine_counts_beside_that_of_gpus() -> None:
    # Each rank copies what it saves there: 11 GiB of weights and moments.
    with pytest.raises(PlacementError, match=r"of machine memory"):
        search(GRPO_7B, gpus(8, 500, host_gib=24))


def test_a_refusal_of_the_trainer_is_kept_to_and_told() -> None:
    chosen = search(GRPO_7B, gpus(8, 80), refusal=lambda c, s: "no" if c.layout.pp > 1 else "")
    assert chosen.chosen.candidate.layout.pp == 1
    with pytest.raises(ConfigError, match=r"no valid layout .*: prompts are too few"):
        search(GRPO_7B, gpus(8, 80), refusal=lambda c, s: "prompts are too few")


def test_a_process_that_only_decodes_needs_room_too() -> None:
    reserved_cpus = replace(GRPO_7B, shape=QWEN_05B, samplers=1, runs_ahead=True)
    assert search(reserved_cpus, gpus(1, 80)).chosen.allocation.ranks == 1
    with pytest.raises(PlacementError, match="only decodes needs"):
        search(replace(reserved_cpus, sampler_bytes=400.0), gpus(1, 80))
    fixed = FixedSettings(tokens=4096)
    alone = search(replace(reserved_cpus, samplers=0), cores(8, 200), fixed).chosen.memory.peak
    shared = search(reserved_cpus, cores(8, 200), fixed, reserved_cpus=4.0).chosen
    assert shared.memory.peak > alone + RUNTIME
    assert shared.allocation.cpus == 4.0


LABEL = "ray.io/accelerator-type"


def gpu_node(name: str, gpus: float = 8.0, kind: str = "H100") -> ClusterNode:
    amounts = {"CPU": 64.0, "GPU": gpus, "memory": 100.0 * GIB, f"accelerator_type:{kind}": 1.0}
    return ClusterNode(name, amounts, {LABEL: kind})


def test_nodes_without_cores_run_nothing() -> None:
    head = ClusterNode("head", {"memory": 4.0 * GIB, "node:10.0.0.1": 1.0})
    cluster = cluster_of([head, gpu_node("a"), gpu_node("b")])
    assert [machine.name for machine in cluster.machines] == ["a", "b"]
    assert cluster.gpus == 16
    assert str(cluster) == ("2 machines, 16 × H100 of 80.0 GiB, 128 cores, 200.0 GiB for workers")
    with pytest.raises(PlacementError, match="no CPU and no GPU for workers"):
        cluster_of([head])


def test_a_machine_knows_its_gpus_better_than_the_table() -> None:
    cluster = cluster_of([gpu_node("a", kind="A100"), gpu_node("b", kind="A100")], {"a": 80 * GIB})
    assert [machine.gpu_memory for machine in cluster.machines] == [80 * GIB, 40 * GIB]
    with pytest.raises(PlacementError, match=r"how much memory the GPUs of c .*Mystery"):
        cluster_of([gpu_node("c", kind="Mystery")])
    assert cluster_of([gpu_node("c", kind="Mystery")], {"c": GIB}).machines[0].gpu_memory == GIB


def test_gpu_memory_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory_here(str(tmp_path)) == 0
    amd = tmp_path / "card1" / "device"
    amd.mkdir(parents=True)
    (amd / "mem_info_vram_total").write_text("206141652992\n")
    assert gpu_memory_here(str(tmp_path)) == 206141652992
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n[ \"$2\" = '--format=csv,noheader,nounits' ] && echo '81559\n81251'\n"
    )
    os.chmod(tool, 0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    assert gpu_memory_here(str(tmp_path)) == 81251 << 20


def test_ranks_are_one_a_gpu_filled_machine_by_machine() -> None:
    cluster = cluster_of([gpu_node("a", 4.0), gpu_node("b", 4.0)])
    allocations = {allocation.ranks: allocation for allocation in cluster.allocations()}
    assert sorted(allocations) == [1, 2, 3, 4, 8]
    assert allocations[8].per_machine == 4
    assert allocations[8].machines == 2
    assert allocations[8].cpus == 16.0
    assert allocations[8].host_memory == 25 * GIB
    assert allocations[2].host_memory == 50 * GIB
    assert allocations[2].machines == 1
    assert {allocation.ranks for allocation in cluster.less_gpus(1).allocations()} == {
        1,
        2,
        3,
        4,
        7,
    }


def test_ranks_are_one_a_machine_without_gpus() -> None:
    machines = [Machine("a", 8.0, 4 * GIB), Machine("b", 8.0, 6 * GIB), Machine("c", 2.0, 90 * GIB)]
    cluster = Cluster(tuple(machines))
    found = {(s.ranks, s.cpus, s.memory // GIB) for s in cluster.allocations()}
    # Two ranks of 2 cores would land on one machine of 8; so a and b only go together.
    assert found == {(1, 8.0, 4), (1, 2.0, 90), (2, 8.0, 4)}
    assert {s.cpus for s in cluster.allocations(reserved_cpus=3.0) if s.ranks == 2} == {5.0}


@pytest.mark.usefixtures("ray_cluster")
def test_a_real_ray() -> None:
    cluster = read_cluster()
    [machine] = cluster.machines
    assert machine.cpus == 2.0
    assert machine.gpus == 0
    assert GIB // 8 < machine.memory < 1 << 45


SEVEN_B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def folder(tmp_path: Path, **changes: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B | changes))
    return str(tmp_path)


def test_it_prints_the_choice_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", folder(tmp_path), "--gpus", "4", "--memory-gb", "80", "--rows", "4"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 × H100 of 80.0 GiB" in lines[0]
    assert lines[1].startswith("  chosen  ")
    assert "4 ranks" in lines[1]
    assert "least estimated time" in lines[3]
    head = next(i for i, line in enumerate(lines) if line.lstrip().startswith("layout"))
    shown = "layout ranks rollout-tp tokens to-save-memory GiB train-s move-s roll-s lost-by"
    assert lines[head].split() == shown.replace("-", " ").split()
    assert lines[head + 1].lstrip().startswith("*")


def test_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", folder(tmp_path), "--gpus", "1", "--memory-gb", "24"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: trainer.placement=auto finds no layout that fits on 1 machine")
    assert said.count("\n") == 1
    mixture = folder(tmp_path, model_type="deepseek_v3", num_experts=128, num_experts_per_tok=8)
    assert main(["--model", mixture, "--gpus", "8"]) == 2
    assert "can't price a mixture of experts" in capsys.readouterr().err


def test_a_model_that_is_missing_is_one_sentence_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "nope", "--gpus", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --model='nope' does not exist; give a folder")
    assert said.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "docs/placement.md" in capsys.readouterr().out
