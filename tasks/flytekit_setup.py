"""Set up flytekit before tasks load: patches, images, and credentials."""

import atexit
import functools
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flyteidl.core.literals_pb2 import LiteralMap
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

from engine.console import INTERRUPTED, end_process, say
from engine.errors import ConfigError
from engine.stages import pods
from engine.stages.stage import is_dry_run

# What loading this module changes in flytekit 1.16.


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """End on Ctrl-C with the status of all commands here; flytekit's own handler ends with 1."""
    atexit.register(end_process, INTERRUPTED)  # a call of Ray's ends with 1 whatever the status
    sys.exit(INTERRUPTED)


FlyteContextManager.add_signal_handler(_exit)

_derive: Any = PydanticTransformer.get_literal_type


@functools.cache
def _derived(transformer: PydanticTransformer, model: type[BaseModel]) -> LiteralType:
    """Derive a pydantic model's literal type once (half of a start's time), without warnings."""
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        return _derive(transformer, model)
    finally:
        logger.setLevel(level)


PydanticTransformer.get_literal_type = _derived

_read_scalar: Any = Scalar.from_flyte_idl


def _with_error(message: Any) -> Scalar:
    """Convert the protobuf of an error, which fails to be tried as `FlyteError | None`."""
    scalar: Scalar = _read_scalar(message)
    if message.HasField("error"):
        scalar._error = Error.from_flyte_idl(message.error)
    return scalar


Scalar.from_flyte_idl = _with_error

_builder: Any = FlyteContext.Builder
_enter_branch = _builder.enter_conditional_section


def _enter_with_new_state(self: Any) -> Any:
    """Give a `conditional` in another one's sub-workflow its own state (flyteorg/flyte#6426)."""
    # In local runs flytekit shares one: the inner branch always runs its first case, and the rest
    # of the sub-workflow is skipped.
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


# Stages are named by what they make, as in their own lines.
_ARTIFACTS = {"preprocess": "dataset", "evaluate": "evaluation", "promote": "promotion"}


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
    name = task.rpartition(".")[2].removesuffix("_stage")
    return _ARTIFACTS.get(name, name)


def evict_missing() -> int:
    """Drop cached results of our tasks whose folders are no longer there; return how many."""
    if not LocalTaskCache._initialized:
        LocalTaskCache.initialize()
    cache, evicted = LocalTaskCache._cache, 0  # of diskcache
    # Keys are, e.g., tasks.stages.sft_stage-<version>-<inputs>.
    for key in [key for key in cache.iterkeys() if str(key).startswith("tasks.")]:
        stored = cache.get(key)
        outputs = LiteralMap.FromString(stored) if isinstance(stored, bytes) else LiteralMap()
        if any(not path.exists() for path in local_outputs(outputs)):
            evicted += bool(cache.delete(key))
    return evicted


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


_local_task: Any = PythonTask
_execute = _local_task.sandbox_execute


def _plan_alone(task: Any, context: FlyteContext, inputs: Any) -> Any:
    """End a local run, with status 0, before the first stage that would be computed."""
    name, mode = _stage_name(task.name), getattr(task, "execution_mode", None)
    planning = name in ("plan", "plan_promotion", "trigger_retraining")
    planning |= mode == PythonFunctionTask.ExecutionBehavior.DYNAMIC
    if planning or task.name.startswith("tasks.failure."):  # whose workflow's error is raised
        return _execute(task, context, inputs)
    say(f"cached    {', '.join(_cached_stages) or 'nothing'}")
    say(f"to do     {name} and what follows it; dry run, nothing is computed")
    sys.exit(0)


if is_dry_run():
    _local_task.sandbox_execute = _plan_alone


# Images and credentials, of `engine.stages.pods` as flytekit takes them.

# What Flyte fills in from its `--image` (`pyflyte run`, `register` or `package`).
TEMPLATE = "{{.image.default.fqn}}:{{.image.default.version}}"


def image(kind: str = "default") -> str:
    """Return the image of a kind, "default", "cuda" or "rocm"; without one, Flyte's."""
    return pods.image(kind) or TEMPLATE


def with_secrets(*needs: pods.Need) -> dict[str, object]:
    """Return options of a task: its secrets, and what its pod must know to read them."""
    secrets = pods.secrets_of(*needs)
    if not secrets:
        return {}
    names = ",".join(f"{variable}={s.group}/{s.key}" for variable, s in secrets.items())
    # Flyte sets the variable itself where it is new enough; else `load_secrets` does.
    secret = partial(Secret, mount_requirement=Secret.MountType.ENV_VAR)
    requests = [secret(s.group, s.key, env_var=variable) for variable, s in secrets.items()]
    return {"secret_requests": requests, "environment": {pods.SECRETS: names}}


def load_secrets() -> None:
    """Set the variables of the task's secrets in a pod; ConfigError for one that is missing."""
    for variable, secret in pods.read_secrets(os.environ.get(pods.SECRETS, "")).items():
        if variable in os.environ:
            continue
        try:
            os.environ[variable] = current_context().secrets.get(secret.group, secret.key)
        except ValueError:
            raise ConfigError(
                f"the secret {secret.group}/{secret.key} for {variable} is not in this pod; create "
                "it in the project's namespace, or register without it"
            ) from None
