"""Whether the settings of distillation make sense together; nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.config import RLConfig, TeacherConfig
from engine.errors import ConfigError
from engine.models import require_model_folder, vocabulary_and_context

_SERVED = tuple(
    name for name in TeacherConfig.model_fields if name not in ("model", "url", "weight", "rows")
)


def check_teachers(config: RLConfig) -> None:
    """Raise ConfigError for teachers, a loss or a layout that don't go together."""
    algorithm, settings = config.algorithm, config.algorithm.distillation
    if not algorithm.teachers:
        raise ConfigError(
            "algorithm.dataflow=distillation learns from a teacher; set algorithm.teacher to a "
            "model folder, or algorithm.distillation.teachers"
        )
    if config.actor.use_kl_loss:
        raise ConfigError(
            "actor.use_kl_loss with algorithm.dataflow=distillation: the KL to the teacher is "
            "what is learned already; set actor.use_kl_loss=false"
        )
    compares = settings.loss != "policy_gradient"
    for i, teacher in enumerate(settings.teachers):
        if teacher.url:
            _check_served(config, f"algorithm.distillation.teachers[{i}].url={teacher.url}")
    parallel = config.actor.parallel
    if compares and (parallel.tp > 1 or parallel.pp > 1):
        raise ConfigError(
            f"algorithm.distillation.loss={settings.loss} with actor.parallel.tp={parallel.tp} and "
            f"pp={parallel.pp}: it needs all logits of a token in one place; set both to 1 (dp, "
            "fsdp and sp go), or take loss=policy_gradient"
        )
    for setting, path in algorithm.teacher_models.items():
        require_model_folder(path, setting)


def compares_whole_vocabularies(config: RLConfig) -> bool:
    """Whether student and teachers meet in one process, as both have logits over all tokens."""
    settings = config.algorithm.distillation
    return settings.loss != "policy_gradient" and not settings.top_k


def check_teacher_tokens(
    config: RLConfig,
    max_model_len: int,
    check_tokens: Callable[[str, str, str], None],
) -> None:
    """Raise ConfigError for a teacher that reads other tokens than the student, or fewer.

    `check_tokens(setting, folder, why)` compares a tokenizer's vocabulary.
    """
    why = "distillation compares token by token"
    for setting, path in config.algorithm.teacher_models.items():
        check_tokens(setting, path, why)
        context = vocabulary_and_context(path)[1]
        if context < max_model_len:
            raise ConfigError(
                f"{setting}={path} reads {context} tokens, and prompt and completion have up to "
                f"{max_model_len}; lower data.max_response_length, or choose another teacher"
            )
    for i, teacher in enumerate(config.algorithm.distillation.teachers):
        if teacher.tokenizer:
            setting = f"algorithm.distillation.teachers[{i}].tokenizer"
            check_tokens(setting, teacher.tokenizer, why)


def unused_distillation(config: RLConfig) -> Iterator[tuple[str, str]]:
    """Changed settings of distillation that nothing reads, each with the reason."""
    settings, section = config.algorithm.distillation, "algorithm.distillation"
    if settings.loss != "jsd" and settings.beta != 0.5:
        yield f"{section}.beta={settings.beta}", f"with loss={settings.loss}"
    if settings.loss == "policy_gradient" and settings.top_k:
        yield f"{section}.top_k={settings.top_k}", "with loss=policy_gradient"
    for i, teacher in enumerate(settings.teachers):
        name = f"{section}.teachers[{i}]"
        if settings.route_by and teacher.weight != 1:
            yield f"{name}.weight={teacher.weight}", "with route_by: a row has one teacher"
        for field in () if teacher.url else _SERVED:
            value = getattr(teacher, field)
            if value != TeacherConfig.model_fields[field].default:
                yield f"{name}.{field}={value}", "without url"


def _check_served(config: RLConfig, setting: str) -> None:
    if compares_whole_vocabularies(config):
        raise ConfigError(
            f"{setting} with algorithm.distillation.loss={config.algorithm.distillation.loss} and "
            "top_k=0: a server gives log-probs of the likeliest tokens alone; set "
            "algorithm.distillation.top_k, to 16 for instance"
        )
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"{setting} with rollout.temperature={config.rollout.temperature}: a server gives "
            "log-probs at temperature 1; set rollout.temperature=1"
        )
