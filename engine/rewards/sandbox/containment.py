"""What keeps a program from the host's files, processes and network, in layers.

Namespaces, file system, users, limits, and the seccomp filter of system calls (Linux on x86-64
and arm64). Standard library alone.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import NamedTuple, TypeAlias

LAYERS = ("namespaces", "root", "user", "landlock", "seccomp")
_libc = ctypes.CDLL(None, use_errno=True)

# The seccomp filter allows threads, files and memory. New processes, programs and sockets, signals
# to others, and whatever changes or looks into other processes, mounts or the kernel are refused
# with EPERM.

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


class _Machine(NamedTuple):
    """The numbers of one architecture; `table` has those of `_NAMES`, which are refused."""

    arch: int
    table: str
    clone: int
    kill: int
    tgkill: int
    sendto: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, _X86, clone=56, kill=62, tgkill=234, sendto=44),
    "aarch64": _Machine(0xC00000B7, _ARM, clone=220, kill=129, tgkill=131, sendto=206),
}
_CLONE3 = 435
_Line: TypeAlias = tuple[int, int, int, int]  # instruction, jumps if true and false, value


def restrict() -> bool:
    """Put the filter on this process for good; False where the host has none.

    Signals are allowed to the process that calls this, and to nobody else.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None or struct.calcsize("P") != 8:
        return False
    if _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    program = _filter(machine, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return not _libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header), 0, 0)


def _filter(machine: _Machine, pid: int) -> bytes:
    refused, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

    def allowed_if(number: int, *conditions: tuple[int, int, int]) -> list[_Line]:
        """Allow a call if (test, place in `struct seccomp_data`, value) hold, else refuse it."""
        lines: list[_Line] = [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, refused)]
        for test, place, value in reversed(conditions):
            lines = [(_LOAD, 0, 0, place), (test, 0, len(lines) - 1, value), *lines]
        return [(_JEQ, 0, len(lines), number), *lines]

    lines: list[_Line] = [
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
    for number in map(int, machine.table.split()):
        if number >= 0:
            lines += [(_JEQ, 0, 1, number), (_RETURN, 0, 0, refused)]
    lines += allowed_if(machine.clone, (_JSET, _ARG0, _CLONE_THREAD))
    lines += allowed_if(machine.kill, (_JEQ, _ARG0, pid))
    lines += allowed_if(machine.tgkill, (_JEQ, _ARG0, pid))
    lines += allowed_if(machine.sendto, (_JEQ, _ARG4, 0), (_JEQ, _ARG4 + 4, 0))  # no address
    lines += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


# Namespaces where the host allows them (as root, or in a user namespace), Landlock where it has no
# mounts of its own, another user where it may change to one, and limits always. Linux's own calls
# by ctypes: the standard library has none for these.

NEWUSER, NEWNS = 0x10000000, 0x00020000
_NEWPID, _NEWNET, _NEWIPC, _NEWUTS = 0x20000000, 0x40000000, 0x08000000, 0x04000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP = 1, 4, 24
_CAP_VERSION_3 = 0x20080522
_LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self on every architecture
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin")
_DEVICES = ("null", "zero", "urandom", "random")


def die_with_parent() -> None:
    """End this process when the one that started it ends."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide() -> None:
    """Keep other processes of this user from reading this one's memory and environment."""
    _libc.prctl(_DUMPABLE, 0, 0, 0, 0)


def new_namespaces() -> bool:
    """Mounts, processes, network, IPC and names of its own; False where the host refuses.

    The namespace of processes begins with the next fork.
    """
    kinds = NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    if os.geteuid() == 0 and not _libc.unshare(kinds):
        return True
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(kinds | NEWUSER):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError:
        return False
    return True


def own_root(folder: str, megabytes: int) -> bool:
    """Make `/` a small file system in memory with the interpreter, read-only, and `/tmp`."""
    prefix = os.path.realpath(sys.base_prefix)
    seen = [path for path in (*_SYSTEM, prefix) if os.path.isdir(path)]
    root = os.path.realpath(folder)
    try:
        _mount("none", "/", "", _REC | _PRIVATE)
        _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={megabytes}m,mode=755")
        for path in seen:
            if os.path.islink(path):  # /lib is /usr/lib
                os.symlink(os.readlink(path), root + path)
            elif not any(path.startswith(other + "/") for other in seen):
                os.makedirs(root + path, exist_ok=True)
                _mount(path, root + path, "", _BIND | _REC)
                _mount("none", root + path, "", _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)
        os.mkdir(root + "/dev")
        for name in _DEVICES:
            Path(f"{root}/dev/{name}").touch()
            _mount(f"/dev/{name}", f"{root}/dev/{name}", "", _BIND)
        os.mkdir(root + "/tmp")
        os.chmod(root + "/tmp", 0o1777)
        os.chdir(root)
        pivot_root = _PIVOT_ROOT[os.uname().machine]
        if _libc.syscall(pivot_root, b".", b".") or _libc.umount2(b".", _DETACH):
            return False
        os.chdir("/tmp")
    except (OSError, KeyError):
        return False
    return True


def landlock(folder: str) -> bool:
    """Let this process read the system and the interpreter, and write below `folder` alone."""
    create, add, restrict_self = _LANDLOCK
    version = _libc.syscall(create, None, 0, 1)
    if version < 1:
        return False
    everything = (1 << (13 if version == 1 else 14 if version == 2 else 15)) - 1
    execute, write_file, read_file, read_folder = 1 << 0, 1 << 1, 1 << 2, 1 << 3
    attributes = ctypes.create_string_buffer(struct.pack("Q", everything), 8)
    rules = _libc.syscall(create, attributes, 8, 0)
    if rules < 0:
        return False
    allowed = dict.fromkeys((*_SYSTEM, sys.base_prefix), read_file | read_folder)
    allowed |= dict.fromkeys([f"/dev/{name}" for name in _DEVICES], read_file | write_file)
    for path, access in (allowed | {folder: everything & ~execute}).items():
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, descriptor), 12)
        failed = _libc.syscall(add, rules, 1, rule, 0)
        os.close(descriptor)
        if failed:
            return False
    _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # which it asks for
    done = not _libc.syscall(restrict_self, rules, 0)
    os.close(rules)
    return done


def other_user(uid: int) -> bool:
    """Become the user `uid`, who owns nothing here; without capabilities in any case."""
    for capability in range(64):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    changed = False
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            changed = True
        except OSError:  # a user namespace has but one
            pass
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAP_VERSION_3, 0), 8)
    _libc.capset(header, ctypes.create_string_buffer(24))
    return changed


def limit(memory_mb: int, cpu_s: int, file_mb: int, processes: int) -> None:
    """Most address space, CPU time, size of a file, and threads of the user (0: as they are)."""
    megabyte = 1 << 20
    limits = {
        resource.RLIMIT_AS: memory_mb * megabyte,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_mb * megabyte,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if processes:
        limits[resource.RLIMIT_NPROC] = processes
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [text.encode() or None for text in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)
