"""Code as an answer, and the sandbox it runs in."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hostile_programs import CHEATS, HARMLESS, HOSTILE

from engine.errors import RewardError
from engine.rewards import open_reward, score
from engine.rewards.code import code, has_program, program, read_tests, same_output, same_value
from engine.rewards.sandbox import Limits, Sandbox, containment
from engine.rewards.sandbox.containment import LAYERS

WANTS_42 = {"inputs": ["41"], "outputs": ["42"]}


NOBODY = 65534


SITE = sysconfig.get_paths()["platlib"]


def judge(truth: Any, text: str, seconds: float = 4.0, without: str = "") -> list[bool]:
    layers = tuple(layer for layer in LAYERS if layer != without)
    limits = Limits(memory_mb=256, layers=layers)
    return read_tests(truth).judge(text, limits, seconds, stop=False).passed


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the host that everybody may read and write."""
    path = tmp_path_factory.mktemp("host") / "mark"
    path.write_text("42")
    path.chmod(0o666)
    for folder in (path.parent, path.parent.parent):
        folder.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def calls() -> Any:
    """A server of this host that notes who calls."""
    called: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(2, 2) as udp:
        server.settimeout(0.2)
        udp.bind(server.getsockname())
        udp.settimeout(0.2)
        done = threading.Event()

        def listen(one: socket.socket, how: str) -> None:
            while not done.is_set():
                try:
                    one.accept() if how == "tcp" else one.recv(1)
                    called.append(how)
                except TimeoutError:
                    continue

        threads = [threading.Thread(target=listen, args=a) for a in ((server, "tcp"), (udp, "udp"))]
        for thread in threads:
            thread.start()
        yield server.getsockname()[1], called
        done.set()
        for thread in threads:
            thread.join()


def test_no_hostile_program_passes_or_does_harm(
    mark: Path, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them side by side, as the completions of a batch are."""
    monkeypatch.setenv("SECRET", "hush")
    port, called = calls
    spinning = {HOSTILE[name] for name in ("spins", "spins_in_c", "huge_integer")}
    spinning.add(HOSTILE["closes_its_output"])  # nothing is left for it to answer with
    before = {process.pid for process in psutil.process_iter()}
    free = psutil.virtual_memory().available

    def passes(text: str) -> list[bool]:
        placed = text.replace("PORT", str(port)).replace("MARK", str(mark))
        return judge(WANTS_42, placed, seconds=0.5 if text in spinning else 1.5)

    with ThreadPoolExecutor(8) as threads:
        results = dict(zip(HOSTILE, threads.map(passes, HOSTILE.values()), strict=True))
    assert {name: passed for name, passed in results.items() if passed == [True]} == {}
    assert judge(WANTS_42, HARMLESS, seconds=20) == [True], "the host judges on"
    assert mark.read_text() == "42"
    assert list(mark.parent.iterdir()) == [mark]
    assert called == []
    assert free - psutil.virtual_memory().available < 2 << 30
    assert left_behind(before) == []


def left_behind(before: set[int]) -> list[str]:
    """Processes of our sandboxes that are still there after a moment.

    They are of users of their own or, where this user may not make any, of this process or nobody's
    children.
    """
    until = time.monotonic() + 10
    while True:
        sandboxed = [str(p) for p in psutil.process_iter() if is_left(p, before)]
        if not sandboxed or time.monotonic() > until:
            return sandboxed
        time.sleep(0.1)


def is_left(process: psutil.Process, before: set[int]) -> bool:
    try:
        if process.pid in before or process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.uids().real >= 1_000_000:
            return True
        above = [parent.pid for parent in process.parents()]
        of_ours = process.ppid() == 1 or os.getpid() in above
        return of_ours and any("sandbox.guest" in word for word in process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return False


def test_no_cheat_passes() -> None:
    forms: list[Any] = ["assert f(41) == 42", {"fn_name": "f", "inputs": [[41]], "outputs": [42]}]
    spins = CHEATS["spins"]
    cases = [
        (form, text, 0.5 if text is spins else 3.0) for form in forms for text in CHEATS.values()
    ]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda case: judge(*case), cases))
    assert [case for case, passed in zip(cases, found, strict=True) if any(passed)] == []
    for form in forms:
        assert judge(form, "def f(x): return x + 1", seconds=20) == [True]


@pytest.mark.slow
@pytest.mark.parametrize("without", ["seccomp", "namespaces", "user"])
def test_each_layer_holds_without_another(without: str, mark: Path) -> None:
    names = ["fork_bomb", "fork_bomb_that_goes_on", "memory_bomb", "kills_everybody", "daemon"]
    names += ["reads_files", "writes_files", "fills_the_disk", "spins", "searches_proc"]
    before = {process.pid for process in psutil.process_iter()}
    for name in names:
        judge(WANTS_42, HOSTILE[name].replace("MARK", str(mark)), 1.5, without)
    assert mark.read_text() == "42"
    assert judge(WANTS_42, HARMLESS, 20, without) == [True]
    assert left_behind(before) == []


def test_a_sandbox_tells_what_the_host_gives() -> None:
    with Sandbox(Limits()) as sandbox:
        first = sandbox.run("print(input())\nopen('a', 'w').write('x')", 20, "a line")
        assert (first.output, first.how, first.status, first.well) == (
            "a line\n",
            "itself",
            0,
            True,
        )
        assert first.layers is not None
        assert "seccomp" in first.layers
        assert {"root", "landlock"} & {*first.layers}
        failed = sandbox.run("raise ValueError", 20)
        assert (failed.status, failed.well) == (1, False)
        start = time.monotonic()
        late = sandbox.run("while True: pass", 0.3)
        assert (late.how, late.well) == ("late", False)
        assert time.monotonic() - start < 5
        waits = (
            "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print(1)))"
        )
        assert sandbox.run(waits + ".start()", 20).output == "1\n", "threads are waited for"
        folder = sandbox._folder
    assert not os.path.exists(folder)


def test_the_kinds_of_tests() -> None:
    add = "def add(a, b): return a + b"
    for truth, text, passed in (
        ({"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}, "print(sum(map(int, input().split())))",
         [True, False]),
        ([{"input": "2", "output": "4 \n"}], "n = int(input())\nprint(n * n)\n", [True]),
        (json.dumps({"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [[3], "ab"]}),
         add, [True, True]),
        ([{"input": "[1, 2]\n[3]", "output": "[1, 2, 3]", "fn_name": "add"}],
         "class Solution:\n    def add(self, a, b): return a + b", [True]),
        ({"fn_name": "add", "inputs": np.array([[1, 2]]), "outputs": np.array([3])}, add, [True]),
        (["assert add(1, 2) == 3", "assert add([1], [2]) == [1]"], add, [True, False]),
        ("import math\nassert math.isclose(add(.1, .2), .3)\nassert add((1,), ()) == (1,)", add,
         [True, True]),
        ({"test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
         add, [True]),
        ("try:\n    root(-1)\nexcept ValueError:\n    ok = True\nassert ok and STEP == 2",
         "import math\nSTEP = 2\ndef root(x): return math.sqrt(x)", [True]),
        ("s = Stack()\nassert s.top() == 3",
         "class Stack:\n    def top(self): return 3", [True]),
    ):  # fmt: skip
        assert judge(truth, text, seconds=20) == passed, truth


def test_outputs_and_results_are_compared_as_data_sets_mean_them() -> None:
    assert same_output("1  2 \n3\n\n", "1 2\n3")
    assert same_output("0.30000000001", "0.3")
    assert not same_output("1\n2", "1 2")
    assert not same_output("1.0", "1")
    assert not same_output("nan", "1.5")
    assert same_value((1, [2.0]), [1, [2.0]])
    assert same_value({1: "a"}, {"1": "a"})
    assert not same_value(True, 1)
    assert not same_value("1", 1)
    assert same_value(0.1 + 0.2, 0.3)


def test_the_last_fenced_program_counts() -> None:
    text = "```python\nprint(1)\n```\nno:\n```py\nprint(2)\n```\n```text\noutput\n```"
    assert program(text) == "print(2)\n"
    assert program("```\nprint(3)") == "print(3)"
    assert program("print(4)") == "print(4)"
    assert has_program(text)
    assert not has_program("```\nprint(3)")


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("x = (", "holds no test cases"),
        ("x = 1", "it has none"),
        ({"answer": 3}, r"its keys are \['answer'\]"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        (None, "holds no test cases"),
    ],
)
def test_a_ground_truth_without_tests_is_an_error(truth: Any, said: str) -> None:
    with pytest.raises(RewardError, match=f"row 0: ground_truth .*{said}"):
        code([""], ["print(1)"], ground_truth=[truth])


def test_the_reward_scores_in_its_pool() -> None:
    truths = [{"inputs": ["1", "2"], "outputs": ["2", "3"]}] * 3
    texts = [f"```python\n{HARMLESS}\n```", "```\nprint(2)\n```", "no idea"]
    columns = {"ground_truth": truths}
    for processes, options, wanted in (
        (2, {}, [1.0, 0.0, 0.0]),
        (1, {"partial": True}, [1.0, 0.5, 0.0]),
    ):
        reward = open_reward("code", options, processes=processes, sample_timeout_s=30)
        try:
            scores = score(reward, texts, texts, columns, 60.0)
        finally:
            reward.close()
        assert [row[0] for row in scores.rows] == wanted
        assert not scores.failures


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="they are run without root's rights already")
@pytest.mark.parametrize("more", [(), ("--no-new-privs",)], ids=["nobody", "no new privileges"])
def test_a_user_without_rights_is_as_safe(more: tuple[str, ...]) -> None:
    """The same tests as nobody, who may not become another user."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *more]
    python, root = nobodys_python(user), Path(__file__).parents[3]
    own = tempfile.mkdtemp(prefix="nobody-")
    os.chown(own, NOBODY, NOBODY)
    done = subprocess.run(
        [
            *(*user, python, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={own}/t"),
            *(__file__, "-m", "not gpu"),
            *("-k", "hostile or cheat or host_gives or pool or layer_holds"),
        ],
        cwd=root,
        env=os.environ
        | {"HOME": own, "TMPDIR": own, "PYTHONDONTWRITEBYTECODE": "1"}
        | {"PYTHONPATH": os.pathsep.join([str(root), SITE])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    shutil.rmtree(own, ignore_errors=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert re.search(r"\b7 passed", done.stdout), done.stdout


def nobodys_python(user: list[str]) -> str:
    """A Python of this version that nobody may start from within; skips where there is none."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not here (util-linux)")
    starts = "import os, subprocess, sys, numpy; p = os.path.realpath(sys.executable)\n"
    starts += "subprocess.run([p, '-c', ''], check=True)"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/python{version}"):
        done = subprocess.run(
            [*user, python, "-c", starts],
            env=os.environ | {"PYTHONPATH": SITE},
            capture_output=True,
            timeout=60,
            check=False,
        )
        if done.returncode == 0:
            return python
    pytest.skip(f"nobody may start no Python {version} here")


HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",  # which arm64's own includes
}


TABLES = {"x86_64": containment._X86, "aarch64": containment._ARM}


ALLOW, REFUSED, MISSING, KILLED = "allow", "EPERM", "ENOSYS", "kill"


PID = 4242


def kernels_numbers(machine: str) -> dict[str, int]:
    """Calls by name, as the kernel's header has them."""
    file = Path(HEADERS[machine])
    if not file.is_file():
        pytest.skip(f"{file} is not here (linux-libc-dev)")
    text = file.read_text()
    found = {
        name: int(number)
        for name, number in re.findall(r"^#define\s+__NR_(\w+)\s+(\d+)", text, re.MULTILINE)
    }
    for name, alias in re.findall(r"^#define __NR_(\w+) __NR3264_(\w+)$", text, re.MULTILINE):
        number = re.search(rf"^#define __NR3264_{alias} (\d+)$", text, re.MULTILINE)
        if number is not None:  # a call that only other machines have
            found.setdefault(name, int(number[1]))
    return found


def ours(machine: str) -> dict[str, int]:
    return dict(zip(containment._NAMES.split(), map(int, TABLES[machine].split()), strict=True))


@pytest.mark.parametrize("machine", HEADERS)
def test_each_number_is_the_kernels(machine: str) -> None:
    kernels = kernels_numbers(machine)
    assert {name: kernels.get(name, -1) for name in ours(machine)} == ours(machine)
    own = containment._MACHINES[machine]
    for name in ("clone", "kill", "tgkill", "sendto"):
        assert getattr(own, name) == kernels[name]
    assert kernels["clone3"] == containment._CLONE3


@pytest.mark.parametrize("machine", HEADERS)
def test_what_the_filter_says(machine: str) -> None:
    own = containment._MACHINES[machine]
    program = containment._filter(own, PID)

    def said(number: int, *arguments: int, arch: int = own.arch) -> str:
        return interpret(program, number, arch, arguments)

    numbers = ours(machine)
    assert {said(number) for number in numbers.values() if number >= 0} == {REFUSED}
    plain = kernels_numbers(machine)
    for name in ("read", "write", "mmap", "munmap", "exit_group", "futex", "getpid", "close",
                 "rt_sigaction", "clock_gettime", "recvfrom", "brk", "openat"):  # fmt: skip
        assert said(plain[name]) == ALLOW, name
    thread = 0x00010000
    assert said(own.clone, thread) == ALLOW
    assert said(own.clone, 17) == REFUSED, "a new process"
    assert said(containment._CLONE3) == MISSING, "so that libc takes clone"
    for call in (own.kill, own.tgkill):
        assert said(call, PID, 9) == ALLOW
        assert said(call, 1, 9) == REFUSED
        assert said(call, 2**32 - 1, 9) == REFUSED, "everybody"
    assert said(own.sendto, 3, 0, 8, 0, 0) == ALLOW
    assert said(own.sendto, 3, 0, 8, 0, 1 << 40) == REFUSED, "to an address"
    assert said(0x40000000) == KILLED, "x32's numbers"
    assert said(containment._NEWEST) == MISSING
    other = next(m for name, m in containment._MACHINES.items() if name != machine)
    assert said(plain["read"], arch=other.arch) == KILLED, "another machine's numbers"


def interpret(program: bytes, number: int, arch: int, arguments: tuple[int, ...]) -> str:
    """Run a filter as the kernel does, on one call's `struct seccomp_data`."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, arch, 0, *padded)
    lines = list(struct.iter_unpack("HBBI", program))
    at, accumulator = 0, 0
    while True:
        code, yes, no, value = lines[at]
        at += 1
        if code == 0x20:  # load a word
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            known = {
                0x7FFF0000: ALLOW, 0x80000000: KILLED,
                0x00050000 | errno.EPERM: REFUSED, 0x00050000 | errno.ENOSYS: MISSING,
            }  # fmt: skip
            return known[value]
        else:
            holds = {
                0x15: accumulator == value, 0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]  # fmt: skip
            at += yes if holds else no
