"""`python -m engine.planner --model PATH --gpus 8 --memory-gb 80`: the table, without a cluster.

It shows the layout that a run with `trainer.placement: auto` would get on such machines, and why.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from engine.console import command_line, quiet, say
from engine.planner import Cluster, Machine, explain
from engine.planner.resources import GB, GIB, gpu, gpu_of
from engine.storage.filesystem import pin_revision


@command_line(2)
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; return 0, or 2 with one sentence where there is none."""
    options = _parser().parse_args(arguments)
    quiet()
    say(_plan(options))
    return 0


def _plan(options: argparse.Namespace) -> str:
    model = pin_revision(options.model, "--model")  # what follows loads torch
    # Above this room; needed by the command alone.
    from engine.config import LoRAConfig, parse_config
    from engine.models import resolve_dtype, text_config
    from engine.trainers.auto_placement import plan_for, workload

    lora, gpus = LoRAConfig(rank=options.lora_rank), options.gpus
    rl: dict[str, object] = {
        "algorithm": {"adv_estimator": options.algorithm},
        "actor": {"parallel": {"compute_dtype": options.compute_dtype}},
        "rollout": {"n": options.completions, "engine": options.engine},
        "trainer": {"placement": "auto", "train_batch_size": options.prompts, "mode": options.mode},
    }
    config = parse_config({"rl": rl}).rl
    width, compute_dtype = text_config(model).hidden_size, options.compute_dtype
    work = workload(
        config,
        model_path=model,
        lora=lora,
        dtype=resolve_dtype(options.dtype, width, gpu=gpus > 0, compute_dtype=compute_dtype),
        max_response_length=options.response_length,
        max_model_len=options.prompt_length + options.response_length,
    )
    known = gpu(options.accelerator)
    gpu_memory = options.memory_gb or known.memory_gib or 80
    kind = gpu_of(
        options.accelerator,
        memory_gib=gpu_memory,
        tflops=options.tflops or known.flops / 1e12,
        memory_gbs=options.memory_gbs or known.bandwidth / GB,
        link_gbs=options.link_gbs or known.link / GB,
    )
    memory = options.host_memory_gb or (128 * gpus or options.memory_gb or 64)
    parts: dict[str, Any] = {"cpus": float(options.cpus), "memory": int(memory * GIB)}
    if gpus:
        parts |= {"gpus": gpus, "gpu_memory": int(gpu_memory * GIB)}
        parts["accelerator"] = options.accelerator
    machines = (Machine(f"machine {n}", **parts) for n in range(options.machines))
    cluster = Cluster(tuple(machines), {options.accelerator: kind})
    return explain(plan_for(config, work, cluster, lora), options.rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.planner",
        description="Price the layouts of an RL run on machines that are only described. Memory "
        "and seconds are estimates; see docs/placement.md.",
    )
    add, count, positive, size = (
        parser.add_argument, _at_least(int, 0), _at_least(int, 1), _at_least(float, 0)
    )  # fmt: skip
    add("--model", required=True, help="folder with a config.json, or hub id")
    add("--gpus", type=count, default=0, help="GPUs of a machine; 0: only CPU cores")
    add("--memory-gb", type=size, default=0.0, help="GiB of a GPU; without GPUs, of a machine")
    add("--accelerator", default="H100", help="as Ray names it (default: %(default)s)")
    add("--tflops", type=size, default=0.0, help="of a GPU, dense bfloat16; 0: its kind's")
    add("--memory-gbs", type=size, default=0.0, help="of a GPU's memory, GB a second")
    add("--link-gbs", type=size, default=0.0, help="to GPUs of the same machine, GB a second")
    add("--machines", type=positive, default=1, help="number of machines (default: 1)")
    add("--cpus", type=positive, default=32, help="cores of a machine (default: %(default)s)")
    add("--host-memory-gb", type=size, default=0.0, help="GiB of a machine (128 per GPU, or 64)")
    add("--algorithm", default="grpo", help="advantage estimator (default: %(default)s)")
    modes = ("sync", "one_step_off", "async")
    add("--mode", choices=modes, default="sync", help="trainer.mode (default: %(default)s)")
    add("--engine", choices=("native", "vllm"), default="native", help="rollout.engine")
    add("--prompts", type=positive, default=128, help="per step (default: %(default)s)")
    add("--completions", type=positive, default=8, help="per prompt (default: %(default)s)")
    add("--prompt-length", type=positive, default=512, help="tokens (default: %(default)s)")
    add("--response-length", type=positive, default=512, help="tokens (default: %(default)s)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="of the weights (default: %(default)s)")
    add("--compute-dtype", choices=("", "float32", "bfloat16"), default="", help="else --dtype")
    add("--lora-rank", type=count, default=0, help="rank of adapters; 0: train all weights")
    add("--rows", type=positive, default=8, help="rows of the table (default: %(default)s)")
    return parser


def _at_least(kind: Callable[[str], float], least: int) -> Callable[[str], float]:
    def number(text: str) -> float:
        if (value := kind(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
