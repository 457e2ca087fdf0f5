"""The worker groups of a run by role, as a dataflow calls them.

A type checker sees `roles.actor` as the actor's worker class called as a group:
`roles.actor.update` leads to `ActorWorker.update`, takes batches that may still be computed, and
gives a `Future` of what that method returns. Only methods with `@dispatch` can be called; others
raise WorkerError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from engine.controller.groups import WorkerGroup
from engine.controller.timeline import Recorder, Span
from engine.errors import PlacementError

if TYPE_CHECKING:
    from engine.workers.actor import ActorWorker
    from engine.workers.base import AsGroup
    from engine.workers.critic import CriticWorker
    from engine.workers.reference import ReferenceWorker
    from engine.workers.reward import RewardWorker
    from engine.workers.rollout import RolloutWorker
    from engine.workers.sft import SFTWorker
    from engine.workers.stream_rollout import StreamRolloutWorker
    from engine.workers.teacher import TeacherWorker

    class ActorGroup(ActorWorker, AsGroup): ...

    class CriticGroup(CriticWorker, AsGroup): ...

    class ReferenceGroup(ReferenceWorker, AsGroup): ...

    class RewardGroup(RewardWorker, AsGroup): ...

    class RolloutGroup(RolloutWorker, AsGroup): ...

    class StreamRolloutGroup(StreamRolloutWorker, AsGroup): ...

    class SFTGroup(SFTWorker, AsGroup): ...

    class TeacherGroup(TeacherWorker, AsGroup): ...


class Roles:
    """All groups of a run; a context manager that closes them.

    The roles of this project are attributes (`roles.actor`); any role, one that an extension adds
    too, is `roles["name"]`, a `WorkerGroup` whose methods no type checker knows.
    """

    if TYPE_CHECKING:
        actor: ActorGroup
        rollout: RolloutGroup
        sampler: RolloutGroup
        reference: ReferenceGroup
        teacher: TeacherGroup
        reward: RewardGroup
        critic: CriticGroup
        sft: SFTGroup
    else:

        def __getattr__(self, role: str) -> WorkerGroup:
            if role.startswith("_") or role not in self._groups:
                raise AttributeError(self._missing(role))
            return self._groups[role]

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        close: Callable[[], None],
        recorder: Recorder | None = None,
        take_spans: Callable[[], list[Span]] = list,
    ) -> None:
        self._groups, self._close = dict(groups), close
        self.recorder, self._take_spans = recorder, take_spans

    def __getitem__(self, role: str) -> WorkerGroup:
        if role not in self._groups:
            raise PlacementError(self._missing(role))
        return self._groups[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def begin_step(self, step: int) -> None:
        """Set the training step that the timeline shows for the calls from now on."""
        if self.recorder:
            self.recorder.step = step

    def timeline(self) -> list[Span]:
        """Spans of all processes since the last time, by start; none without Placement.timeline.

        Waits for the calls in flight, so that none is missing. Raises WorkerError when a process
        is dead or gives no answer.
        """
        if self.recorder is None:
            return []
        return sorted(self._take_spans(), key=lambda span: span.start_ns)

    def close(self) -> None:
        """Stop the workers; a second call does nothing."""
        close, self._close = self._close, lambda: None
        close()

    def _missing(self, role: str) -> str:
        return f"no role {role!r} in this run; there are {sorted(self._groups)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
