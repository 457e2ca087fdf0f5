"""Spans of real processes, the trace made of them, and that nothing is recorded unasked."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from probe_worker import Probe
from thorough import and_slow

from engine.batch import LazyBatch
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.timeline import Recorder, Span, recording, span, trace, write_trace
from engine.controller.worker_host import RoleSpec

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS = [RoleSpec("probe", Probe), RoleSpec("other", Probe)]


def placed(kind: Literal["ray", "local"], timeline: bool = True) -> Placement:
    pools = (Pool(("probe",), cpus=0.5), Pool(("other",), cpus=0.5))
    return Placement(pools, kind, call_timeout_s=60, timeline=timeline)


def overlap(one: Span, other: Span) -> bool:
    """Whether both were under way at one moment."""
    return one.start_ns < other.end_ns and other.start_ns < one.end_ns


def run_two_roles(kind: Literal["ray", "local"], folder: Path) -> list[Span]:
    """Two roles meet in step 7, then one reads what the other gave; one more call in step 8."""
    with launch(placed(kind), SPECS) as roles:
        roles.begin_step(7)
        first = roles.probe.meet(str(folder))
        with span("advantages"):
            roles.other.meet(str(folder)).result()
        roles.other.total(LazyBatch(first), 1.0).result()
        roles.begin_step(8)
        roles.probe.whoami()
        spans = roles.timeline()
        assert [s.name for s in roles.timeline()] == [], "spans are given once"
    return spans


@pytest.mark.parametrize("kind", and_slow(["local"], ["ray"]))
def test_spans_show_the_overlap(
    ray_cluster: None, tmp_path: Path, kind: Literal["local", "ray"]
) -> None:
    begun = time.time_ns()
    spans = run_two_roles(kind, tmp_path)
    found = {f"{s.role}.{s.name}": s for s in spans}
    first, second, total = found["probe.meet"], found["other.meet"], found["other.total"]
    assert overlap(first, second)
    assert overlap(second, first)
    assert not overlap(first, total), "it needs the first one's result"
    assert overlap(first, found["controller.advantages"])
    ended = time.time_ns() + 1e6  # the clock may be corrected meanwhile
    assert all(begun <= s.start_ns <= s.end_ns <= ended for s in spans)
    assert {s.step for s in spans if s.name != "whoami"} == {7}
    assert found["probe.whoami"].step == 8
    assert (first.process, second.process, first.rank) == ("probe/0", "other/0", 0)
    pids = {first.pid, second.pid, found["controller.advantages"].pid}
    assert len(pids) == (3 if kind == "ray" else 1)
    assert total.after == (first.call,)
    assert "controller.wait for other.total" in found
    assert [s.start_ns for s in spans] == sorted(s.start_ns for s in spans)


def span_of(name: str, start: int, end: int, **changes: Any) -> Span:
    fields = {"role": "actor", "rank": 0, "step": 3, "pid": 10, "process": "actor/0"}
    return Span(name, start_ns=start, end_ns=end, machine="vm", **(fields | changes))


def test_the_trace_file_loads_back(tmp_path: Path) -> None:
    spans = [
        span_of("generate", 5_000_000, 9_000_000, role="rollout", call=1),
        span_of("score", 9_500_000, 9_900_000, role="reward", process="reward/0", call=2, pid=11),
        span_of("update", 10_000_000, 12_000_000, call=3, after=(1, 2, 99)),
    ]
    path = write_trace(spans, tmp_path / "deep" / "trace.json")
    assert os.listdir(path.parent) == ["trace.json"]
    read = json.loads(path.read_text())
    events = read["traceEvents"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    update = slices["actor.update"]
    assert (update["ts"], update["dur"]) == (5000.0, 2000.0)
    assert update["args"] == {"step": 3, "rank": 0, "pid": 10}
    assert read["otherData"]["origin_ns"] == 5_000_000
    rows = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert rows == {"actor/0 (vm, pid 10)": update["pid"], "reward/0 (vm, pid 11)": 2}
    lines = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {lines[e["pid"], e["tid"]] for e in slices.values()} == {"actor", "rollout", "reward"}
    starts = [e for e in events if e["ph"] == "s"]
    ends = [e for e in events if e["ph"] == "f"]
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == ["1-3", "2-3"]
    for event in starts:
        producer = slices["rollout.generate" if event["id"] == "1-3" else "reward.score"]
        assert producer["ts"] <= event["ts"] <= producer["ts"] + producer["dur"]
    assert all(e["ts"] == update["ts"] and e["tid"] == update["tid"] for e in ends)


def test_a_trace_that_can_t_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = write_trace([span_of("update", 1, 2)], tmp_path / "trace.json")
    before = path.read_text()
    with pytest.raises(TypeError):
        write_trace([span_of("update", 1, 2, step=object())], path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["trace.json"]
    assert trace([])["traceEvents"] == []


def test_spans_nest_and_record_what_raises() -> None:
    recorder = Recorder("controller")
    with recording(recorder), pytest.raises(KeyError), span("outer"), span("inner"):
        raise KeyError
    with span("after"):
        pass
    inner, outer = recorder.take()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert recorder.take() == []


def test_a_second_launch_can_join_a_timeline() -> None:
    with launch(placed("local"), SPECS) as roles:
        one = Placement((Pool(("late",)),), "local")
        with launch(one, [RoleSpec("late", Probe)], roles.recorder) as more:
            roles.begin_step(4)
            more.late.nap(0.0).result()
            [joined] = more.timeline()
        assert (joined.role, joined.step, joined.process) == ("late", 4, "late/0")
        assert [s.name for s in roles.timeline()] == ["wait for late.nap"]


def test_nothing_is_recorded_unless_asked_for() -> None:
    with launch(placed("local", timeline=False), SPECS) as roles:
        roles.begin_step(1)
        assert roles.probe.nap(0.0).result() == 0.0
        assert roles.timeline() == []
        start = time.perf_counter()
        for _ in range(1000):
            with span("advantages"):
                pass
        assert time.perf_counter() - start < 0.1, "a span that is off costs microseconds"
