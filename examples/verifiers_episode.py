"""Episodes of `verifiers` (0.4), by its own rollout code: a program for the Python that has it.

    VENV/bin/python examples/verifiers_episode.py CONFIG --rows 100 > rows.jsonl
    rl.rollout.agent.play.name="VENV/bin/python examples/verifiers_episode.py CONFIG"

CONFIG is the `env` section of verifiers as JSON, e.g. {"taskset": {"id": "gsm8k-v1"}}. An episode's
reward is the sum over its traces, whose metrics come beside it. Nothing of this project is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any


def load(config: str) -> Any:
    """The environment of a configuration, as `vf-eval` loads it."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    return load_environment(resolve_env_config(json.loads(config)))


async def play(env: Any, index: int) -> dict[str, object]:
    """Play the task at `index` with the model that the environment's variables name."""
    import verifiers.v1 as vf

    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    context = vf.ModelContext(model="policy", client=client)
    task = next(islice(iter(env.taskset), index, None))
    async with env.serving():
        episode = await env.run_slot(env.slots(task)[0], context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        raise SystemExit(f"{errors[0].type}: {errors[0].message}")
    metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items()}
    return {**metrics, "reward": sum(trace.reward for trace in episode.traces)}


def rows(env: Any, config: str, count: int) -> list[dict[str, object]]:
    """Rows of RL data for the first tasks."""
    made = []
    for index, task in enumerate(islice(iter(env.taskset), count)):
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
        made.append(
            {
                "data_source": json.loads(config)["taskset"]["id"],
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
        )
    return made


def main() -> None:
    """Print rows, or play the episode of the row that the run asks for."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("config", help="the env section of verifiers, as JSON")
    parser.add_argument("--rows", type=int, default=0, help="print the rows of this many tasks")
    options = parser.parse_args()
    env = load(options.config)
    if options.rows:
        for row in rows(env, options.config, options.rows):
            print(json.dumps(row, ensure_ascii=False))
        return
    row = json.loads(Path(os.environ["HYBRIDFLYTE_ROW"]).read_text())
    result = asyncio.run(play(env, int(row["extra_info"]["index"])))
    Path(os.environ["HYBRIDFLYTE_REWARD"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
