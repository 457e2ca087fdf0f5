"""A seccomp filter: which system calls a program may make (Linux on x86-64 and arm64).

Threads, files and memory are allowed. New processes, programs and sockets, signals to others, and
whatever changes or looks into other processes, mounts or the kernel are refused with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG4 = 0, 4, 16, 48  # offsets in `struct seccomp_data`; of low halves
_CLONE_THREAD = 0x00010000
_NEWEST = 463  # calls of later kernels don't exist for the program
_X32 = 0x40000000
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2

# Names in the order of both tables; -1 where an architecture has no such call.
_NAMES = """
execve execveat fork vfork socket connect bind listen accept accept4 sendmsg sendmmsg ptrace
process_vm_readv process_vm_writev tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal
pidfd_open pidfd_getfd kcmp mount umount2 pivot_root chroot unshare setns open_tree move_mount
fsopen fsconfig fsmount fspick mount_setattr bpf perf_event_open keyctl add_key request_key
kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff
io_uring_setup io_uring_enter io_uring_register userfaultfd open_by_handle_at name_to_handle_at
memfd_create memfd_secret shmget shmat shmctl msgget msgsnd semget semop setsid setpgid personality
acct quotactl settimeofday clock_settime clock_adjtime adjtimex syslog sethostname setdomainname
mknod mknodat fanotify_init lookup_dcookie iopl ioperm modify_ldt process_madvise
process_mrelease migrate_pages move_pages setpriority ioprio_set sched_setscheduler sched_setattr
"""
_X86 = """
59 322 57 58 41 42 49 50 43 288 46 307 101
310 311 200 129 297 424
434 438 312 165 166 155 161 272 308 428 429
430 431 432 433 442 321 298 250 248 249
246 320 175 313 176 169 167 168
425 426 427 323 304 303
319 447 29 30 31 68 69 64 65 112 109 135
163 179 164 227 305 159 103 170 171
133 259 300 212 172 173 154 440
448 256 279 141 251 144 314
"""
_ARM = """
221 281 -1 -1 198 203 200 201 202 242 211 269 117
270 271 130 138 240 424
434 438 272 40 39 41 51 97 268 428 429
430 431 432 433 442 280 241 219 217 218
104 294 105 273 106 142 224 225
425 426 427 282 265 264
279 447 194 196 195 186 189 190 193 157 154 92
89 60 170 112 266 171 116 161 162
-1 33 262 18 -1 -1 -1 440
448 238 239 140 30 119 274
"""


class _Machine:
    """The numbers of one architecture."""

    def __init__(
        self, arch: int, table: str, *, clone: int, kill: int, tgkill: int, sendto: int
    ) -> None:
        self.arch, self.clone = arch, clone
        self.kill, self.tgkill, self.sendto = kill, tgkill, sendto
        numbers = dict(zip(_NAMES.split(), map(int, table.split()), strict=True))
        self.denied = sorted(number for number in numbers.values() if number >= 0)


_MACHINES = {
    "x86_64": lambda: _Machine(0xC000003E, _X86, clone=56, kill=62, tgkill=234, sendto=44),
    "aarch64": lambda: _Machine(0xC00000B7, _ARM, clone=220, kill=129, tgkill=131, sendto=206),
}
_CLONE3 = 435


def restrict() -> bool:
    """Put the filter on this process for good; False where the host has none.

    Signals are allowed to the process that calls this, and to nobody else.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None or struct.calcsize("P") != 8:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    program = _filter(machine(), os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return not libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header), 0, 0)


def _filter(machine: _Machine, pid: int) -> bytes:
    refused, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    lines = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, machine.arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_JGE, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_JGE, 0, 1, _NEWEST),
        (_RETURN, 0, 0, missing),
        (_JEQ, 0, 1, _CLONE3),  # its flags are in memory, which a filter can't read: clone is used
        (_RETURN, 0, 0, missing),
    ]
    for number in machine.denied:
        lines += [(_JEQ, 0, 1, number), (_RETURN, 0, 0, refused)]
    lines += [
        (_JEQ, 0, 4, machine.clone),
        (_LOAD, 0, 0, _ARG0),
        (_JSET, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, refused),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in (machine.kill, machine.tgkill):
        lines += [
            (_JEQ, 0, 4, number),
            (_LOAD, 0, 0, _ARG0),
            (_JEQ, 1, 0, pid),
            (_RETURN, 0, 0, refused),
            (_RETURN, 0, 0, _ALLOW),
        ]
    lines += [
        (_JEQ, 0, 6, machine.sendto),  # to the other end alone, and to no address
        (_LOAD, 0, 0, _ARG4),
        (_JEQ, 0, 3, 0),
        (_LOAD, 0, 0, _ARG4 + 4),
        (_JEQ, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, refused),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
