"""The settings, seed, scorer and code that two evaluations must share to be comparable.

The problems themselves are compared by `results.prompt_digest`.
"""

from engine.config import DataConfig, EvaluateConfig
from engine.errors import LineageError
from engine.redaction import redact_values
from engine.rewards import scorer_identity
from engine.storage.artifacts import Manifest
from engine.tracking.connection import flatten

KEYS = ("data", "evaluate", "seed", "scorer")
Settings = dict[str, object]  # JSON values by key


def comparable_settings(data: DataConfig, config: EvaluateConfig, seed: int) -> Settings:
    """The settings that two evaluations must share, as manifests record them.

    From `data` only the token budgets count: the response's, and for episodes the prompt's, if set.
    """
    budgets = {"max_response_length": data.max_response_length}
    if config.runs_episodes and data.max_prompt_length:
        budgets["max_prompt_length"] = data.max_prompt_length
    # The addresses of the reward, the harness and the ranks change no completion.
    names = ["reward", "plugins", "named_content", "lm_eval"]
    names += ["parallel", "map_parts", "start_timeout_s", "step_timeout_s"]
    excluded: dict[str, bool | set[str]] = dict.fromkeys(names, True)
    # Where environments run, how many, and what is saved changes no episode.
    excluded["agent"] = {"num_workers", "concurrency", "save_freq_s"}
    return {
        "data": budgets,
        "evaluate": redact_values(config.model_dump(mode="json", exclude=excluded)),
        "seed": seed,
        "scorer": scorer_identity(config.scorer, config.named_content),
    }


def recorded_settings(evaluation: Manifest) -> Settings:
    """A manifest's `comparable_settings`; LineageError where they are missing."""
    for key in KEYS:
        if key not in evaluation.config:
            raise LineageError(
                f"the evaluation {evaluation.digest[:12]} has no record of its settings {key!r}, "
                "so nothing can be compared with it; evaluate the model again"
            )
    return {key: evaluation.config[key] for key in KEYS}


def require_same_settings(
    evaluation: Manifest, data: DataConfig, config: EvaluateConfig, seed: int
) -> None:
    """Raise LineageError where an evaluation was made under other settings than these."""
    configured, recorded = comparable_settings(data, config, seed), recorded_settings(evaluation)
    for key, (here, there) in _differences(configured, recorded).items():
        raise LineageError(
            f"{key} is {here!r}, and the evaluation {evaluation.digest[:12]} was made with "
            f"{there!r}; give the settings of that run, or evaluate again"
        )


def incomparable(first: Manifest, other: Manifest) -> list[str]:
    """Name what two evaluations don't share, e.g. `["evaluate.temperature", "the code"]`.

    Code is compared by its sources, which tell apart what one commit with edits has in common.
    """
    different = list(_differences(recorded_settings(first), recorded_settings(other)))
    return different + ["the code"] * (first.sources_digest != other.sources_digest)


def _differences(settings: Settings, other: Settings) -> dict[str, tuple[object, object]]:
    """The settings that differ, e.g. `{"evaluate.k": (4, 8)}`, in order."""
    first, second = flatten(settings), flatten(other)
    pairs = {key: (first.get(key), second.get(key)) for key in sorted(first | second)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
