"""A stage as one task per resource profile, and the workflow branch that picks one.

    @on_profiles(cache=stage_cache(), retries=2)
    def sft(run: RunContext, …) -> FlyteDirectory: …

    sft(p.profile, run=p.run, …)        # in a workflow: the branch
    sft["laptop"]                       # the task, registered as tasks.sft.sft_laptop

`tasks.profiles` explains why. Results are cached per profile, since they come from other hardware
in another layout.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from flytekit import Resources, conditional, task
from flytekit.core.python_function_task import PythonFunctionTask

from tasks.images import image
from tasks.nested_branches import patch_nested_branches
from tasks.profiles import PROFILES, Profile, stage_pod

patch_nested_branches()


class TaskVariants:
    """The variants of one stage."""

    def __init__(self, name: str, variants: Mapping[str, PythonFunctionTask[Any]]) -> None:
        self.name, self._variants = name, variants

    def __getitem__(self, profile: str) -> PythonFunctionTask[Any]:
        return self._variants[profile]

    def __call__(self, profile: Any, **inputs: Any) -> Any:
        """Run the variant of `profile` (a promise); to be called in workflows only."""
        section: Any = conditional(self.name)
        step = section.if_
        for name, variant in self._variants.items():
            section = step(profile == name).then(variant(**inputs))
            step = section.elif_
        return section.else_().fail(f"profile is none of {', '.join(self._variants)}")


def on_profiles(
    requests: Resources,
    task_config: Callable[[Profile], Any] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], TaskVariants]:
    """Decorator: make a task of the function for each profile, and register it in its module.

    `requests` is for the profile without GPUs. `task_config(profile)` is for tasks that start a
    cluster, which has the profile's machines; `requests` is then the submitter's in every profile.
    """

    def make(body: Callable[..., Any]) -> TaskVariants:
        module = sys.modules[body.__module__]
        variants = {}
        for profile in PROFILES.values():
            own = dict(options)
            pod = stage_pod(profile) if task_config is None else None
            # Requests of a task would replace those of its pod template.
            own |= {"requests": requests} if pod is None else {"pod_template": pod}
            if task_config is not None:
                own["task_config"] = task_config(profile)
            function = _renamed(body, f"{body.__name__}_{profile.identifier}")
            made: Any = task(function, container_image=image(profile.image), **own)
            # A container finds its task by module and name.
            setattr(module, function.__name__, made)
            variants[profile.name.value] = made
        return TaskVariants(body.__name__, variants)

    return make


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
