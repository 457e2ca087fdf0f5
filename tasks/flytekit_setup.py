"""Set up flytekit before tasks load: patches, images, and credentials.

`workflows.register` loads it before the variables that tasks read are set: it reads none of them
on load.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from flytekit import FlyteContextManager, Secret, current_context
from flytekit.core.base_task import PythonTask
from flytekit.core.context_manager import BranchEvalMode, FlyteContext
from flytekit.core.local_cache import LocalTaskCache
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from flytekit.loggers import logger
from flytekit.models.literals import Scalar
from flytekit.models.types import Error, LiteralType
from pydantic import BaseModel

from engine.console import INTERRUPTED, say
from engine.errors import ConfigError

if TYPE_CHECKING:
    from diskcache import Cache
    from flyteidl.core.literals_pb2 import LiteralMap


# What loading this module changes in flytekit 1.16.


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """End on Ctrl-C with the status of all commands here; flytekit's own handler ends with 1."""
    sys.exit(INTERRUPTED)


FlyteContextManager.add_signal_handler(_exit)

_derive: Any = PydanticTransformer.get_literal_type


@functools.cache
def _derived(transformer: PydanticTransformer, model: type[BaseModel]) -> LiteralType:
    """Derive the literal type of a pydantic model, with a JSON schema, once and silently.

    flytekit does so for every input of every task: this is half of the start-up time of `pyflyte
    run`. A model travels whole, so a field without a Flyte type, which it warns of, loses nothing.
    """
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        return _derive(transformer, model)
    finally:
        logger.setLevel(level)


PydanticTransformer.get_literal_type = _derived

_read_scalar: Any = Scalar.from_flyte_idl


def _with_error(message: Any) -> Scalar:
    """Convert an error in a scalar to flytekit's own class, so that it can be printed.

    flytekit leaves the protobuf in place, and fails when it tries variants of `FlyteError | None`.
    """
    scalar: Scalar = _read_scalar(message)
    if message.HasField("error"):
        scalar._error = Error.from_flyte_idl(message.error)
    return scalar


Scalar.from_flyte_idl = _with_error

_builder: Any = FlyteContext.Builder
_enter_branch = _builder.enter_conditional_section


def _enter_with_new_state(self: Any) -> Any:
    """Give a `conditional` in the sub-workflow of another one its own state, as on a cluster.

    In local runs flytekit shares one state between both (flyteorg/flyte#6426): the inner branch
    always runs its first case, and marks the state as done when it ends, so that the rest of the
    sub-workflow is skipped.
    """
    state = self.execution_state
    running = state is not None and state.branch_eval_mode == BranchEvalMode.BRANCH_ACTIVE
    entered = _enter_branch(self)
    if running and state.is_local_execution():
        skipped = BranchEvalMode.BRANCH_SKIPPED  # until a case is chosen
        entered.execution_state = state.with_params(branch_eval_mode=skipped)
    return entered


_builder.enter_conditional_section = _enter_with_new_state


# Flyte's local cache, of local runs: on a cluster the catalogue is Flyte's, and a stage reports a
# missing artifact.

_local_cache: Any = LocalTaskCache
_cached_result = _local_cache.get
_cached_stages: list[str] = []  # those that a dry run found


def _say_cached(task_name: str, *arguments: object) -> object:
    """Say that a result is taken from the cache, which flytekit does in silence."""
    found: object = _cached_result(task_name, *arguments)
    if found is not None and task_name.startswith("tasks."):
        if is_dry_run():
            _cached_stages.append(_stage_name(task_name))
        else:
            say(f"{_stage_name(task_name)}: cached")
    return found


_local_cache.get = _say_cached


def _stage_name(task: str) -> str:
    return task.rpartition(".")[2].removesuffix("_stage")


def evict_missing() -> int:
    """Drop cached results of our tasks whose folders are no longer there; return how many."""
    from flyteidl.core.literals_pb2 import LiteralMap

    cache, evicted = open_cache(), 0
    # Keys are, e.g., tasks.stages.sft_stage-<version>-<inputs>.
    for key in [key for key in cache.iterkeys() if str(key).startswith("tasks.")]:
        stored = cache.get(key)
        outputs = LiteralMap.FromString(stored) if isinstance(stored, bytes) else LiteralMap()
        if any(not path.exists() for path in local_outputs(outputs)):
            evicted += bool(cache.delete(key))
    return evicted


def open_cache() -> Cache:
    """Return the diskcache.Cache of local results, which `pyflyte local-cache clear` empties."""
    if not LocalTaskCache._initialized:
        LocalTaskCache.initialize()
    return LocalTaskCache._cache


def local_outputs(outputs: LiteralMap) -> Iterator[Path]:
    """Yield this machine's files and folders among a task's outputs (a protobuf LiteralMap)."""
    todo = list(outputs.literals.values())
    while todo:
        literal = todo.pop()
        todo += literal.collection.literals
        for uri in (literal.scalar.blob.uri, literal.scalar.structured_dataset.uri):
            if uri and "://" not in uri:
                yield Path(uri)


# A dry run, HYBRIDFLYTE_DRY_RUN=1 pyflyte run …: the plan is made, recorded nowhere, and stages are
# looked up in the local cache until one is not there.

DRY_RUN = "HYBRIDFLYTE_DRY_RUN"


def is_dry_run() -> bool:
    """Tell whether workflows are planned alone."""
    return os.environ.get(DRY_RUN, "") not in ("", "0")


_local_task: Any = PythonTask


def _plan_alone() -> None:
    """Let local runs end, with status 0, before the first stage that would be computed."""
    execute = _local_task.sandbox_execute

    def sandbox_execute(task: Any, context: FlyteContext, inputs: Any) -> Any:
        name = _stage_name(task.name)
        dynamic = (
            getattr(task, "execution_mode", None) == PythonFunctionTask.ExecutionBehavior.DYNAMIC
        )
        if name in ("plan", "plan_promotion", "trigger_retraining") or dynamic:
            return execute(task, context, inputs)
        say(f"cached    {', '.join(_cached_stages) or 'nothing'}")
        say(f"to do     {name} and what follows it; dry run, nothing is computed")
        sys.exit(0)

    _local_task.sandbox_execute = sandbox_execute


if is_dry_run():
    _plan_alone()


# Images of tasks. `python -m workflows.register` sets the variables to references by digest before
# it loads the tasks, so that cache keys contain the images. Without them (`pyflyte run`, `register`
# or `package`) Flyte fills in what its `--image` says.

TEMPLATE = "{{.image.default.fqn}}:{{.image.default.version}}"
VARIABLES = {
    "default": "HYBRIDFLYTE_IMAGE",
    "cuda": "HYBRIDFLYTE_CUDA_IMAGE",
    "rocm": "HYBRIDFLYTE_ROCM_IMAGE",
}


def image(kind: str = "default") -> str:
    """Return the image of a kind, "default", "cuda" or "rocm"; without one, the default."""
    chosen = os.environ.get(VARIABLES[kind]) or os.environ.get(VARIABLES["default"])
    return chosen or TEMPLATE


# Credentials of pods, by Flyte's secrets: variable, then group and key of the secret, as in
#
#     HYBRIDFLYTE_SECRETS="MLFLOW_TRACKING_TOKEN=hybridflyte/mlflow,HF_TOKEN=hybridflyte/hub"
#
# They are part of a task's template, so the setting is read when tasks are registered (`python -m
# workflows.register --secret …`). On a laptop variables are what they are.

VARIABLE = "HYBRIDFLYTE_SECRETS"
Need = Literal["hub", "loggers"]

# Variables that only tasks with that need get; all others are every task's.
_OF: Mapping[Need, re.Pattern[str]] = {
    "hub": re.compile(r"HF_|HUGGING_?FACE_"),
    "loggers": re.compile(r"WANDB_"),
}
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ENTRY = re.compile(rf"([A-Z_][A-Z0-9_]*)=({_WORD})/({_WORD})")


def read_secrets(text: str) -> dict[str, Secret]:
    """Return the secrets by variable; ConfigError for what is none."""
    secrets: dict[str, Secret] = {}
    for entry in (part.strip() for part in text.split(",") if part.strip()):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(
                f"{VARIABLE}: {entry!r} is no VARIABLE=GROUP/KEY; give the variable and the "
                "secret's name, never its value, such as HF_TOKEN=hybridflyte/hub"
            )
        variable, group, key = match.groups()
        if variable in secrets:
            raise ConfigError(f"{VARIABLE} names {variable} twice; leave one out")
        # Flyte sets the variable itself where it is new enough; else `load_secrets` does.
        env_var = Secret.MountType.ENV_VAR
        secrets[variable] = Secret(group, key, mount_requirement=env_var, env_var=variable)
    return secrets


def with_secrets(*needs: Need) -> dict[str, Any]:
    """Return options of a task: its secrets, and what its pod must know to read them."""
    text = os.environ.get(VARIABLE, "")
    secrets = {
        name: secret
        for name, secret in read_secrets(text).items()
        if all(need in needs or not names.match(name) for need, names in _OF.items())
    }
    if not secrets:
        return {}
    names = ",".join(f"{name}={s.group}/{s.key}" for name, s in secrets.items())
    return {"secret_requests": list(secrets.values()), "environment": {VARIABLE: names}}


def registration_environment() -> dict[str, str]:
    """Return variables of a pod that writes templates of tasks, which read them on load."""
    return {v: os.environ[v] for v in (*VARIABLES.values(), VARIABLE) if v in os.environ}


def load_secrets() -> None:
    """Set the variables of the task's secrets in a pod; ConfigError for one that is missing."""
    for variable, secret in read_secrets(os.environ.get(VARIABLE, "")).items():
        if variable in os.environ:
            continue
        try:
            os.environ[variable] = current_context().secrets.get(secret.group, secret.key)
        except ValueError:
            raise ConfigError(
                f"the secret {secret.group}/{secret.key} for {variable} is not in this pod; create "
                "it in the project's namespace, or register without it"
            ) from None
