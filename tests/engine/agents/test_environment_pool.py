"""Environments in processes: many at once, and those that hang, die, raise or lie."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.agents import Action, EnvironmentFailure, EnvironmentPool, Observation
from engine.errors import ConfigError

HERE = Path(__file__).parent
NAME = "faulty_environments:ByText"


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    sys.path.insert(0, str(HERE))
    yield
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def pool(_path: None) -> Iterator[EnvironmentPool]:
    with EnvironmentPool(NAME, {"bonus": 1.0}, processes=1, timeout_s=1.0) as opened:
        yield opened


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    assert true()


def test_an_episode_is_played_and_its_environment_plays_the_next(pool: EnvironmentPool) -> None:
    assert pool.tools[0]["function"] == {"name": "f"}
    assert pool.resumable
    for _ in range(2):
        episode = pool.open()
        first = episode.reset({"start": 7}).result()
        assert first == Observation(({"role": "user", "content": "7"},))
        seen = [episode.step(Action(text)).result() for text in ("go", "go", "end")]
        assert [one.reward for one in seen] == [2.0, 3.0, 4.0]
        assert [one.done for one in seen] == [False, False, True]
        assert str(seen[0].info["thing"]).startswith("<object object")
        last = seen[-1].messages[0]["content"]
        episode.close()
    number = int(last.split()[-1])
    assert number >= 2  # of the same environment


def test_a_thousand_episodes_are_played_at_once(pool: EnvironmentPool) -> None:
    episodes = [pool.open() for _ in range(1000)]
    for one in [episode.reset({"start": 1}) for episode in episodes]:
        one.result()
    for turn in (1, 2):
        answers = [episode.step(Action("go")) for episode in episodes]
        assert {answer.result().reward for answer in answers} == {1.0 + turn}
    for episode in episodes:
        episode.close()


@pytest.mark.parametrize(
    ("word", "cause", "words"),
    [
        ("sleep", "deadline", "gave no answer within 1 s"),
        ("stubborn", "deadline", "gave no answer within 1 s"),
        ("raise", "raised", "raised RuntimeError: out of luck"),
        ("leave", "raised", "SystemExit: 3"),
        ("lie", "malformed", "returned dict; return an Observation of engine.agents"),
        ("text", "malformed", "a message is a mapping"),
        ("nan", "not_finite", "returned reward nan"),
    ],
)
def test_a_failure_costs_its_own_episode(
    pool: EnvironmentPool, word: str, cause: str, words: str
) -> None:
    good, bad = pool.open(), pool.open()
    for one in [good.reset({"start": 1}), bad.reset({"start": 2})]:
        one.result()
    pid = good.step(Action("go")).result().info["pid"]
    with pytest.raises(EnvironmentFailure, match=words) as caught:
        bad.step(Action(word)).result(10)
    assert caught.value.cause == cause
    if word == "raise":
        assert "faulty_environments.py" in str(caught.value.__cause__)
    after = good.step(Action("go")).result(10)
    assert (after.reward, after.info["pid"]) == (3.0, pid)  # the same process goes on
    with pytest.raises(EnvironmentFailure) as again:
        bad.step(Action("go")).result(10)
    assert again.value.cause == "lost"
    assert bad.reset({"start": 3}).result(10).messages[0]["content"] == "3"
    good.close()
    bad.close()


def test_a_reset_that_raises_is_told(pool: EnvironmentPool) -> None:
    episode = pool.open()
    with pytest.raises(EnvironmentFailure, match="reset raised ValueError: no such start"):
        episode.reset({"start": "raise"}).result(10)
    with pytest.raises(EnvironmentFailure, match="can't be sent"):
        episode.reset({"start": lambda: 1}).result(10)
    episode.close()


@pytest.mark.parametrize(
    ("word", "cause", "words"),
    [
        ("exit", "crashed", "its process ended with exit status 7"),
        ("hold", "deadline", "gave no answer within 1 s"),
        ("spin", "deadline", "gave no answer within 1 s"),
        ("block", "deadline", "gave no answer within 1 s"),
        ("catch", "deadline", "gave no answer within 1 s"),
    ],
)
def test_a_process_that_is_lost_is_replaced(
    pool: EnvironmentPool, word: str, cause: str, words: str
) -> None:
    good, bad, waiting = pool.open(), pool.open(), pool.open()
    for one in [episode.reset({"start": 1}) for episode in (good, bad, waiting)]:
        one.result()
    pid = good.step(Action("go")).result().info["pid"]
    failing = bad.step(Action(word))
    with pytest.raises(EnvironmentFailure, match=words) as caught:
        failing.result(20)
    assert caught.value.cause == cause
    with pytest.raises(EnvironmentFailure) as lost:
        good.step(Action("go")).result(20)
    assert lost.value.cause == "lost"
    good.reset({"start": 1}).result(20)
    assert good.step(Action("go")).result(20).info["pid"] != pid
    assert not psutil.pid_exists(int(str(pid)))
    for episode in (good, bad, waiting):
        episode.close()


def test_code_that_keeps_the_loop_costs_other_calls_no_deadline(pool: EnvironmentPool) -> None:
    """Who is late is told from who waits for it: these are lost, and may begin again."""
    bad, others = pool.open(), [pool.open() for _ in range(3)]
    for one in [episode.reset({"start": 1}) for episode in (bad, *others)]:
        one.result()
    waiting = [episode.step(Action("nap")) for episode in others]  # for less than the deadline
    failing = bad.step(Action("block"))
    for answer in waiting:
        with pytest.raises(EnvironmentFailure) as lost:
            answer.result(20)
        assert lost.value.cause == "lost"
    late = failing.exception(20)
    assert isinstance(late, EnvironmentFailure)
    assert late.cause == "deadline"
    for episode in (bad, *others):
        episode.close()


def test_a_state_moves_to_another_episode(pool: EnvironmentPool) -> None:
    one, other = pool.open(), pool.open()
    one.reset({"start": 1}).result()
    one.step(Action("go")).result()
    state = one.get_state().result()
    other.set_state(state).result()
    assert other.step(Action("go")).result().reward == 3.0
    one.close()
    other.close()


def test_what_can_t_be_made_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="raised OSError: no licence"):
        EnvironmentPool("faulty_environments:Broken", processes=1)
    with pytest.raises(ConfigError, match="doesn't read 'speed'"):
        EnvironmentPool(NAME, {"speed": 1}, processes=1)
    with pytest.raises(ConfigError, match="call_timeout_s=0"):
        EnvironmentPool(NAME, timeout_s=0)


def test_a_pool_that_is_closed_leaves_nothing_behind() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    pool = EnvironmentPool(NAME, processes=2, timeout_s=5.0)
    episodes = [pool.open() for _ in range(2)]
    for episode in episodes:
        episode.reset({"start": 1}).result()
    child = episodes[0].step(Action("child")).result().info["child"]
    waiting = episodes[1].step(Action("sleep"))
    pool.close()
    with pytest.raises(EnvironmentFailure, match="was closed"):
        waiting.result(5)
    with pytest.raises(EnvironmentFailure, match="is closed"):
        episodes[0].step(Action("go")).result(5)
    assert not psutil.pid_exists(int(str(child)))
    assert {c.pid for c in psutil.Process().children(recursive=True)} <= before


INTERRUPTED = """
import sys
from engine.agents import Action, EnvironmentPool
pool = EnvironmentPool("faulty_environments:ByText", processes=1, timeout_s=600)
episode = pool.open()
episode.reset({"start": 1}).result()
pid = episode.step(Action("go")).result().info["pid"]
print(pid, flush=True)
episode.step(Action(sys.argv[1])).result()
"""


@pytest.mark.parametrize(("sent", "word"), [(signal.SIGINT, "sleep"), (signal.SIGKILL, "spin")])
def test_nothing_outlives_a_run_that_is_interrupted(sent: signal.Signals, word: str) -> None:
    paths = os.pathsep.join([str(HERE), *sys.path])
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, word],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert program.stdout is not None
    process = psutil.Process(int(program.stdout.readline()))
    left = [process, *process.parents()[:1]]
    time.sleep(0.1)
    program.send_signal(sent)
    _, errors = program.communicate(timeout=30)
    assert program.returncode != 0
    if sent == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    wait_until(lambda: not any(one.is_running() for one in left))
