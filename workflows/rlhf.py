"""The main job: data → warm start (or none) → RL → evaluation → promotion.

    pyflyte run workflows/rlhf.py rlhf
    pyflyte run workflows/rlhf.py rlhf --source gsm8k --path ../shared/data/gsm8k \
        --config workflows/configs/gsm8k_smoke.yaml

Composition only: what a stage does is in `tasks/`.
"""

from flytekit import workflow
from flytekit.types.file import FlyteFile

from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.evaluate import evaluate
from tasks.inputs import RLHFConfig
from tasks.plan import plan
from tasks.preprocess import preprocess
from tasks.report import report
from tasks.rl import rl
from tasks.sft import sft
from workflows.approval import gate


@workflow(on_failure=failure.rlhf_failed)
def rlhf(
    config: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    source: str = "",
    path: str = "",
    model: str = "",
    seed: int = -1,
    profile: str = "laptop",
) -> FlyteFile:
    """Warm-start a model (unless `sft.skip`), improve it by RL, and promote it if it is better.

    Args:
        config: Settings as JSON or a YAML file; see engine/config/ for all of them.
        source: Data source, arithmetic, gsm8k or files; empty: as in config.
        path: File, folder, s3:// prefix or hub id of the data; empty: as in config.
        model: Hugging Face model folder to start from; empty: as in config.
        seed: Seed of data, weights and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The run's summary.json.
    """
    p = plan(config=config, source=source, path=path, model=model, seed=seed, profile=profile)
    dataset = preprocess(
        run=p.run,
        data=p.data,
        source_digest=p.source_digest,
        model_path=p.model_path,
        model_digest=p.start_digest,
        context=p.context,
        seed=p.seed,
    )
    warm_start = sft(
        p.sft_profile,
        run=p.run,
        dataset=dataset,
        start=p.start,
        start_digest=p.start_digest,
        config=p.sft,
        seed=p.seed,
    )
    policy = rl(
        p.profile,
        run=p.run,
        dataset=dataset,
        warm_start=warm_start,
        data=p.data,
        config=p.rl,
        lora=p.lora,
        seed=p.seed,
        dtype=p.rl_dtype,
    )
    evaluation = evaluate(
        p.profile,
        run=p.run,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
        data=p.data,
        config=p.evaluate,
        seed=p.seed,
    )
    promotion = gate(
        p.needs_approval,
        profile=p.profile,
        run=p.run,
        dataset=dataset,
        policy=policy,
        evaluation=evaluation,
        data=p.data,
        evaluate=p.evaluate,
        config=p.promote,
        seed=p.seed,
    )
    return report(
        run=p.run,
        config_digest=p.config_digest,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
        evaluation=evaluation,
        promotion=promotion,
    )
