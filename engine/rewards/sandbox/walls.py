"""What a sandbox takes from its programs: the host's files, processes, network, and resources.

Namespaces where the host allows them (as root, or in a user namespace), Landlock where it has no
mounts of its own, another user where it may change to one, and limits always. Linux's own calls by
ctypes: the standard library has none for these.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from pathlib import Path

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

_libc = ctypes.CDLL(None, use_errno=True)


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
        if _libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."):
            return False
        if _libc.umount2(b".", _DETACH):
            return False
        os.chdir("/tmp")
    except (OSError, KeyError):
        return False
    return True


def landlock(folder: str) -> bool:
    """Let this process read the system and the interpreter, and write below `folder` alone."""
    create, add, restrict = _LANDLOCK
    version = _libc.syscall(create, None, 0, 1)
    if version < 1:
        return False
    everything = (1 << (13 if version == 1 else 14 if version == 2 else 15)) - 1
    reading = 1 << 2 | 1 << 3  # files and folders
    attributes = ctypes.create_string_buffer(struct.pack("Q", everything), 8)
    rules = _libc.syscall(create, attributes, 8, 0)
    if rules < 0:
        return False
    places = [(path, reading) for path in (*_SYSTEM, sys.base_prefix) if os.path.isdir(path)]
    for path, allowed in [*places, (folder, everything & ~1), *_devices()]:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, place), 12)
        failed = _libc.syscall(add, rules, 1, rule, 0)
        os.close(place)
        if failed:
            return False
    _libc.prctl(38, 1, 0, 0, 0)  # no new privileges, which it asks for
    done = not _libc.syscall(restrict, rules, 0)
    os.close(rules)
    return bool(done)


def _devices() -> list[tuple[str, int]]:
    return [
        (f"/dev/{name}", 1 << 1 | 1 << 2) for name in _DEVICES if os.path.exists(f"/dev/{name}")
    ]


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
