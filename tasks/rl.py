"""Task `rl`: GRPO or PPO from the warm start, on Ray actors.

Artifact `rl`: a Hugging Face model folder with its tokenizer, `metrics.parquet`, a row a step, and
with `trainer.timeline_steps` a `timeline.json` for https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
from datetime import timedelta

from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, LoRAConfig, RLConfig
from tasks.context import SMALL, RunContext, echo, stage, stage_cache
from tasks.ray_cluster import LOCAL_OBJECT_STORE_BYTES, ray_cluster
from tasks.variants import on_profiles

# Requests are the submitter's; they are copied to no Ray pod that has a template of its own.


@on_profiles(
    task_config=ray_cluster,
    cache=stage_cache(),
    requests=SMALL,
    retries=5,
    interruptible=True,
    timeout=timedelta(days=3),
)
def rl(
    run: RunContext,
    dataset: FlyteDirectory,
    warm_start: FlyteDirectory,
    data: DataConfig,
    config: RLConfig,
    lora: LoRAConfig,
    seed: int,
) -> FlyteDirectory:
    """Improve the warm start by reinforcement learning on the dataset's prompts."""
    import pandas as pd

    from engine.cli.ray_session import ray_session
    from engine.cli.step_line import step_line
    from engine.data.loader import PromptLoader
    from engine.trainers.attempts import run_with_retries
    from engine.trainers.rl import RLTrainer

    settings = {
        "rl": config.model_dump(mode="json"),
        "max_response_length": data.max_response_length,
        "seed": seed,
    }
    if lora.rank:
        settings["lora"] = lora.model_dump(mode="json")
    ray = ray_session(config.trainer.placement, LOCAL_OBJECT_STORE_BYTES)
    with stage("rl", run, settings) as this, ray:
        folder = this.load_parent("dataset", dataset)
        model = this.load_parent("warm_start", warm_start)
        lengths = json.loads((folder / "dataset.json").read_text())
        train = pd.read_parquet(folder / "train.parquet")
        rows = pd.read_parquet(folder / "validation.parquet").to_dict("records")
        validation = [{str(k): v for k, v in row.items()} for row in rows]

        def make() -> RLTrainer:
            loader = PromptLoader(train, config.trainer.train_batch_size, seed)
            return RLTrainer(
                model,
                config,
                loader,
                max_response_length=data.max_response_length,
                max_model_len=lengths["max_prompt_length"] + data.max_response_length,
                seed=seed,
                lora=lora,
            )

        def record(rows: list[dict[str, float]]) -> None:
            for row in rows:
                at = int(row["step"])
                if at not in logged:  # by this attempt; the one before had a run of its own
                    logged.add(at)
                    this.tracked.log_metrics({k: v for k, v in row.items() if k != "step"}, at)

        def work(trainer: RLTrainer) -> None:
            def report(step: int, total: int, metrics: dict[str, float]) -> None:
                if step == total or step % config.trainer.test_freq == 0:
                    metrics["validation/reward"] = trainer.validate(validation)
                record([*trainer.history, {"step": float(step)} | metrics])
                echo(step_line(step, total, metrics, [*trainer.history, metrics]))

            trainer.on_step = report
            trainer.fit(checkpoint_dir=checkpoints.folder, resume_from=checkpoints.previous)
            record(trainer.history)  # of a run that was finished already
            trainer.save(this.folder)
            trainer.write_timeline(this.folder / "timeline.json")
            history[:] = trainer.history

        echo(
            f"rl: {config.algorithm.adv_estimator} on {config.trainer.placement}, rollout by "
            f"{config.rollout.engine}, {config.trainer.train_batch_size} prompts × "
            f"{config.rollout.n} completions a step"
        )
        history: list[dict[str, float]] = []
        logged: set[int] = set()
        checkpoints = this.checkpoints()
        this.record_origin(checkpoints)
        run_with_retries(make, work, checkpoints.folder, config.trainer.max_attempts)
        pd.DataFrame(history).to_parquet(this.folder / "metrics.parquet", index=False)
        this.tracked.log_folder(this.folder, "checkpoint")
        final = history[-1]
        published = this.publish({k.replace("/", "_"): v for k, v in final.items()})
        this.delete_local_checkpoints()
        return published
