"""Worker groups on Ray: one actor a rank, futures over the object store, deadlines everywhere.

Results stay in the object store until they are read: a future that is an argument is sent as an
object reference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from engine.batch import Batch, Future
from engine.checkpoint.state_dict import seed_process_rng
from engine.controller import worker_host
from engine.controller.groups import WorkerGroup, seconds_left, timeout_error
from engine.controller.timeline import CallCost, CallCosts, Recorder, span
from engine.errors import EngineError, WorkerError
from engine.worker_process import on_daemon_thread

log = logging.getLogger(__name__)
T = TypeVar("T")
Stored = MutableMapping[Batch, ObjectRef]  # the controller's batches that are in the object store


class RayHost(worker_host.WorkerHost):
    """A host that is a Ray actor; Ray runs its calls in the thread that makes it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.use_threads()

    def build(self, address: str = "") -> int:
        # Else no two runs would save the same state: Ray seeds a process at random.
        seeds = [spec.options.get("seed") for spec in self.specs.values()]
        seed_process_rng(f"{self.name} {seeds}")
        return super().build(address)

    def rendezvous_address(self) -> str:
        """A free port of this process's node, "host:port", for its pool's ranks to meet at."""
        return worker_host.rendezvous_address(ray.util.get_node_ip_address())


class RayFuture(Future[object]):
    """One call on the ranks of a role; its results are in the object store.

    A failure is reported by its cause: where an argument's call failed, or never ended, the error
    names that call's role, rank and method and not those of the call that waited for it.
    """

    def __init__(
        self,
        call: worker_host.RemoteCall,
        statuses: list[ObjectRef[CallCost]],
        refs: list[ObjectRef],
        timeout_s: float,
        call_costs: CallCosts,
        sources: Sequence[Future[object]] = (),
    ) -> None:
        self.number, self._method, self._call_costs = call.number, call.method, call_costs
        self.refs = refs  # the values of the ranks that collect
        names = [f"{call.role} rank {rank}: {call.method}" for rank in range(len(statuses))]
        self.statuses = dict(zip(statuses, names, strict=True))  # of all ranks, their costs
        self._name = f"{call.role}.{call.method}"
        self._timeout_s = timeout_s
        self._sources = [source for source in sources if isinstance(source, RayFuture)]
        self._values: list[object] = []  # one, once it is there

    def result(self, until: float | None = None) -> object:
        """Wait for all ranks; raise WorkerError, or the EngineError that a rank raised."""
        if not self._values:
            with span(f"wait for {self._name}"):
                costs = wait_all(self.statuses, self._timeout_s, self._ancestors(), until)
                self._values = [
                    worker_host.merge_results([_get(ref, self._name, 60.0) for ref in self.refs])
                ]
            self._call_costs.add(self._method, costs)
            self._sources = []  # a success needs no cause, and the arguments may be freed
        return self._values[0]

    def done(self) -> bool:
        count = len(self.statuses)
        ready, _ = ray.wait(list(self.statuses), num_returns=count, timeout=0, fetch_local=False)
        return len(ready) == count or (bool(ready) and self.failure() is not None)

    def failure(self) -> EngineError | None:
        return _first_failure(self.statuses)

    def _ancestors(self) -> list[RayFuture]:
        """The calls that this one takes data from, directly or not, first call first."""
        ancestors: dict[int, RayFuture] = {}
        todo = list(self._sources)
        while todo:
            source = todo.pop()
            if source.number not in ancestors:
                ancestors[source.number] = source
                todo.extend(source._sources)
        return [ancestors[number] for number in sorted(ancestors)]


class RayGroup(WorkerGroup):
    def __init__(
        self,
        spec: worker_host.RoleSpec,
        actors: Sequence[ActorHandle],
        timeout_s: float,
        recorder: Recorder | None = None,
        stored: Stored | None = None,
    ) -> None:
        super().__init__(spec, len(actors), recorder)
        self._actors, self._timeout_s = list(actors), timeout_s
        self._stored: Stored = WeakKeyDictionary() if stored is None else stored

    def _references(self, piece: Batch | Future[object]) -> Sequence[ObjectRef]:
        if isinstance(piece, RayFuture):
            return piece.refs
        value = piece if isinstance(piece, Batch) else piece.result()
        if not isinstance(value, Batch):
            return [_put(value, self._timeout_s)]
        if value not in self._stored:
            self._stored[value] = _put(value, self._timeout_s)
        return [self._stored[value]]

    def _submit(
        self,
        call: worker_host.RemoteCall,
        data: Sequence[object],
        collecting: list[bool],
        sources: Sequence[Future[object]],
    ) -> RayFuture:
        actors = self._actors[: len(collecting)]
        ranks: list[tuple[ObjectRef, ObjectRef[CallCost]]] = [
            actor.measured_call.options(num_returns=2).remote(call, *data) for actor in actors
        ]
        values = [value for (value, _), gives in zip(ranks, collecting, strict=True) if gives]
        statuses = [status for _, status in ranks]
        return RayFuture(call, statuses, values, self._timeout_s, self.call_costs, sources)


def wait_all(
    refs: Mapping[ObjectRef[T], str],
    timeout_s: float,
    ancestors: Sequence[RayFuture] = (),
    until: float | None = None,
) -> list[T]:
    """Return the values of all `refs`, or raise as soon as one of them has failed.

    Also where one of `ancestors` has failed, the calls that they take data from: Ray itself would
    wait for the other arguments first. `refs` maps each reference to its name in a WorkerError.
    """
    deadline = time.monotonic() + seconds_left(timeout_s, until)
    above = {ref: name for ancestor in ancestors for ref, name in ancestor.statuses.items()}
    pending: dict[ObjectRef, str] = {**above, **refs}  # causes come before what they lead to
    values: dict[ObjectRef[T], T] = {}
    while len(values) < len(refs):
        ready, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            what, first = next(n for r, n in refs.items() if r in pending), next(iter(pending))
            waits = f"{what} waits for {above[first]}, which" if first in above else what
            raise timeout_error(waits, timeout_s)
        [ref] = ready
        name = pending.pop(ref)
        try:
            value = _get(ref, name, 60.0)
        except WorkerError as error:
            causes = {ref: name for ref, name in pending.items() if ref in above}
            raise _first_failure(causes) or error from None
        if ref in refs:
            values[ref] = value
    return [values[ref] for ref in refs]


def stop_actors(actors: Sequence[ActorHandle], grace_s: float = 3.0) -> None:
    """Let actors close their roles within `grace_s`, then kill them, also those that are stuck."""
    closing: dict[ObjectRef, ActorHandle] = {actor.close.remote(): actor for actor in actors}
    if not closing:
        return
    ready, _ = ray.wait(list(closing), num_returns=len(closing), timeout=grace_s)
    for ref in ready:
        try:
            ray.get(ref, timeout=1.0)
        except (RayActorError, GetTimeoutError):
            log.debug("%s was dead before it was closed", closing[ref])
        except RayError as error:
            log.warning("a role failed to close: %s", error)
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _put(value: object, timeout_s: float) -> ObjectRef:
    """Store a value; raise WorkerError where this machine's node takes none by the deadline."""
    try:  # in a thread, as `ray.put` waits for ever for a node that is stopped
        return on_daemon_thread(ray.put, value).result(timeout_s)
    except TimeoutError:
        raise WorkerError(
            f"the Ray node of this machine took no data within {timeout_s:g} s; its raylet is "
            "stopped or the machine is overloaded: end that Ray, and resume the run on another"
        ) from None


def _first_failure(refs: Mapping[ObjectRef, str]) -> EngineError | None:
    """The first failure among those that are done."""
    if not refs:
        return None
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
    for ref in (ref for ref in refs if ref in ready):
        try:
            _get(ref, refs[ref], 60.0)
        except EngineError as error:
            return error
    return None


def _get(ref: ObjectRef[T], name: str, timeout_s: float) -> T:
    """Fetch a result that is there; raise the remote EngineError, or a WorkerError."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise timeout_error(name, timeout_s) from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, EngineError):
            raise cause from None
        raise WorkerError(f"{name} failed with {type(cause).__name__}: {error}") from None
    except RayActorError as error:
        raise WorkerError(f"{name} failed: the worker process died: {error}") from None
    except RayError as error:
        raise WorkerError(f"{name} failed in Ray, {type(error).__name__}: {error}") from None
