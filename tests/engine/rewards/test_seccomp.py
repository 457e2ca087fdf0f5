"""The filter of system calls: its numbers, and what it says of each call, on both machines.

arm64's is checked without one: its numbers against the kernel's own list, the filter by a small
interpreter of its program.
"""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from engine.rewards.sandbox import containment

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
