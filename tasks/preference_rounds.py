"""Task `learn_in_rounds`: preferences → reference → update, as often as `pairs.rounds` says.

Of one round it is the offline pipeline. Of several it is iterative: each round's pairs are made by
the policy that the round before left, which is its reference as well. How many there are is known
only when a run starts, so the stages' nodes are written then.
"""

from __future__ import annotations

from datetime import timedelta

from flytekit import dynamic
from flytekit.types.directory import FlyteDirectory

from engine.config import DataConfig, LoRAConfig, PairsConfig, PreferenceTrainingConfig
from tasks.context import IMAGE, SMALL, RunContext
from tasks.credentials import of_registration
from tasks.pairs import pairs
from tasks.preference_training import preference_training, reference_log_probs
from tasks.profiles import Profile


@dynamic(
    cache=False,
    requests=SMALL,
    container_image=IMAGE,
    retries=2,  # of its own pod, as in `tasks.variants`
    timeout=timedelta(days=18),  # holds for all stages of all rounds
    environment=of_registration(),
)
def learn_in_rounds(
    profile: Profile,
    run: RunContext,
    dataset: FlyteDirectory,
    start: FlyteDirectory,
    data: DataConfig,
    pairs_config: PairsConfig,
    pairs_digest: str,
    kind: str,
    reference: PreferenceTrainingConfig,
    config: PreferenceTrainingConfig,
    lora: LoRAConfig,
    dtype: str,
    seed: int,
) -> FlyteDirectory:
    """Preferences → reference → update, `pairs.rounds` times, each on the policy before it."""
    policy = start
    once = pairs_config.model_copy(update={"rounds": 1})  # a round's pairs don't depend on others
    for number in range(pairs_config.rounds):
        made = pairs(
            profile,
            run=run,
            dataset=dataset,
            policy=policy,
            data=data,
            config=once,
            source_digest=pairs_digest,
            kind=kind,
            seed=seed + number,
        )
        known = reference_log_probs(
            profile,
            run=run,
            pairs=made,
            policy=policy,
            config=reference,
            lora=lora,
            dtype=dtype,
            too_long=pairs_config.too_long,
            seed=seed,
        )
        policy = preference_training(
            profile,
            run=run,
            pairs=made,
            policy=policy,
            reference=known,
            config=config,
            lora=lora,
            dtype=dtype,
            too_long=pairs_config.too_long,
            seed=seed + number,
        )
    return policy
