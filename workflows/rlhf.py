"""The main job: data → warm start (or none) → RL → evaluation → promotion.

    pyflyte run workflows/rlhf.py rlhf
    pyflyte run workflows/rlhf.py rlhf --source gsm8k --path ../shared/data/gsm8k \
        --config preset:gsm8k_smoke

Composition only: what a stage does is in `engine/stages/`.
"""

from flytekit import workflow
from flytekit.types.file import FlyteFile

from tasks import failure  # by module: pyflyte can't list a handler's error input
from tasks.inputs import RLHFConfig
from tasks.stages import plan
from workflows.parts import improve_and_promote, warm_start_of


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
        config: Settings: a YAML or JSON file, preset:NAME, or JSON text.
        source: Data source, arithmetic, gsm8k or files; empty: as in config.
        path: File, folder, s3:// prefix or hub id of the data; empty: as in config.
        model: Hugging Face model folder to start from; empty: as in config.
        seed: Seed of data, weights and sampling; negative: as in config.
        profile: Machines to run on; without a layout in config, also how the model is sharded.

    Returns:
        The run's summary.json.
    """
    p = plan(config=config, source=source, path=path, model=model, seed=seed, profile=profile)
    dataset, warm_start = warm_start_of(p)
    return improve_and_promote(p, dataset, warm_start)
