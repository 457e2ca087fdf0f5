"""A stage on the machines of a profile that is an input: two Flyte tasks from one function.

    @on_profiles(cache=stage_cache(), retries=2)
    def sft(run: RunContext, …) -> FlyteDirectory: …

    sft(p.profile, run=p.run, …)        # in a workflow
    sft_stage(run=…, …)                 # the stage itself, as on a laptop

Flyte 1 takes a task's resources, and the Ray cluster in it, from its template, where no input can
be. The template of a dynamic workflow's node, however, is written while the execution runs. So
`tasks.sft.sft` is a dynamic task, a small pod that reads the profile and writes the node of
`tasks.sft.sft_stage` with pods, image and Ray cluster of these sizes. (`with_overrides` would do
for pods and image, but not for the worker group inside a Ray job.)

Results are cached per profile, since they come from other hardware in another layout. The cache is
the stage's; the dynamic task has none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from flytekit import Cache, Resources, dynamic, task
from flytekit.core.context_manager import FlyteEntities
from flytekit.core.workflow import WorkflowBase

from engine.config import digest
from tasks.context import IMAGE, SMALL
from tasks.credentials import Need, of_registration, with_secrets
from tasks.images import image
from tasks.pods import stage_pod
from tasks.profiles import LAPTOP, Profile

PROFILE_VARIABLE = "HYBRIDFLYTE_PROFILE"  # of a stage's container: its profile as JSON

StageOn = Callable[[Profile], Any]  # makes a stage's task for these machines
# Makes an input of a stage from the profile and the stage's other inputs.
MadeInside = Callable[[Profile, Mapping[str, Any]], Any]


def on_profiles(
    requests: Resources,
    task_config: Callable[[Profile], Any] | None = None,
    *,
    retries: int,
    timeout: timedelta,
    cache: Cache | bool = False,
    needs: tuple[Need, ...] = ("hub",),
    made_inside: Mapping[str, MadeInside] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: the function as a stage whose first input is its profile.

    `requests` is for profiles without GPUs. `task_config(profile)` is for tasks that start a
    cluster, which has the profile's machines, and whose submitter needs little; where it is None,
    there is none in that profile.
    `retries`, `timeout` (of an attempt), `cache`, `needs` (of credentials) and `options` are the
    stage's. `made_inside` are inputs of the stage that the dynamic task makes, by further tasks on
    the same machines.
    """

    def make(body: Callable[..., Any]) -> Any:
        stage_on = stages_of(
            requests,
            task_config,
            retries=retries,
            timeout=timeout,
            cache=cache,
            needs=needs,
            **options,
        )(body)
        return dynamic(
            _with_profile(body, stage_on, made_inside or {}),
            cache=False,
            container_image=IMAGE,
            requests=SMALL,
            retries=2,  # of its own pod: a stage that failed ends it for good
            timeout=(retries + 1) * timeout,  # holds for all attempts at the stage
            environment=of_registration(),
        )

    return make


def stages_of(
    requests: Resources,
    task_config: Callable[[Profile], Any] | None = None,
    *,
    retries: int,
    timeout: timedelta,
    cache: Cache | bool = False,
    needs: tuple[Need, ...] = ("hub",),
    **options: Any,
) -> Callable[[Callable[..., Any]], StageOn]:
    """Decorator: the function as a stage for dynamic tasks to lay out; arguments as there."""

    def make(body: Callable[..., Any]) -> StageOn:
        function = _renamed(body, f"{body.__name__}_stage")

        def stage_on(profile: Profile) -> Any:
            own = dict(options)
            cluster = None if task_config is None else task_config(profile)
            pod = stage_pod(profile) if cluster is None else None
            # Requests of a task would replace those of its pod template.
            own |= {"requests": requests} if pod is None else {"pod_template": pod}
            if cluster is not None:
                own |= {"task_config": cluster, "requests": SMALL}
            asked = with_secrets(*needs)
            environment = {PROFILE_VARIABLE: profile.model_dump_json()}
            own |= asked | {"environment": environment | asked.get("environment", {})}
            own["cache"] = (
                replace(cache, salt=digest(profile)) if isinstance(cache, Cache) else cache
            )
            made = task(
                function,
                container_image=image(profile.image_kind),
                retries=retries,
                timeout=timeout,
                **own,
            )
            # Else flytekit puts the program's name, such as a notebook's, before the stage's.
            made._instantiated_in = body.__module__
            return made

        # A container finds the stage by module and name; there it is of the container's profile.
        here = os.environ.get(PROFILE_VARIABLE)
        profile = Profile.model_validate_json(here) if here else LAPTOP
        setattr(sys.modules[body.__module__], function.__name__, stage_on(profile))
        return stage_on

    return make


def _with_profile(
    body: Callable[..., Any], stage_on: StageOn, made_inside: Mapping[str, MadeInside]
) -> Callable[..., Any]:
    """The function of the dynamic task: `body`'s inputs after the profile, without those made."""

    @functools.wraps(body)
    def on_machines(profile: Profile, **inputs: Any) -> Any:
        with _unregistered(f"{body.__module__}.{body.__name__}"):
            stage = stage_on(profile)
            made = {name: make(profile, inputs) for name, make in made_inside.items()}
        return stage(**inputs, **made)

    given = inspect.signature(body)
    first = inspect.Parameter("profile", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kept = [one for name, one in given.parameters.items() if name not in made_inside]
    on_machines.__signature__ = given.replace(parameters=[first, *kept])  # type: ignore[attr-defined]
    types_of = {k: v for k, v in body.__annotations__.items() if k not in made_inside}
    on_machines.__annotations__ = {"profile": Profile, **types_of}
    return on_machines


@contextlib.contextmanager
def _unregistered(workflow: str) -> Iterator[None]:
    """Keep from registration what a run makes: stages, and the workflow of the dynamic task."""
    entities = FlyteEntities.entities
    before = {id(one) for one in entities}
    try:
        yield
    finally:
        entities[:] = [
            one
            for one in entities
            if id(one) in before and not (isinstance(one, WorkflowBase) and one.name == workflow)
        ]


def _renamed(function: Callable[..., Any], name: str) -> types.FunctionType:
    """A copy of a module's function under another name."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__doc__, copy.__module__, copy.__qualname__ = function.__doc__, function.__module__, name
    return copy
