"""Programs that try to do harm, or to pass without solving anything; `test_code` runs them.

Each is judged by a test that wants the output "42" for the input "41".
"""

from __future__ import annotations

import platform

TGKILL = {"x86_64": 234, "aarch64": 131}.get(platform.machine(), 234)

HARMLESS = "print(int(input()) + 1)"
HOSTILE = {
    "fork_bomb": "import os\nwhile True:\n    os.fork()",
    "fork_bomb_that_goes_on": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    ),
    "multiprocessing": "import multiprocessing\nmultiprocessing.Pool(8).map(print, range(99))",
    "memory_bomb": "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "memory_at_once": "x = bytearray(1 << 40)",
    "memory_by_threads": (
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "huge_integer": "print(9 ** 9 ** 9)",
    "endless_output": "while True: print('4' * 9999)",
    "endless_output_to_stderr": "import sys\nwhile True: sys.stderr.write('4' * 9999)",
    "spins": "while True: pass",
    "spins_in_c": "sum(range(1 << 62))",
    "sleeps": "import time\ntime.sleep(99)",
    "deep_recursion": (
        "import sys\nsys.setrecursionlimit(1 << 30)\ndef f(x): return f(x + 1)\nf(0)"
    ),
    "exits_well": "import sys\nsys.exit(0)",
    "exits_at_once": "import os\nos._exit(0)",
    "kills_its_parent": "import os\nos.kill(os.getppid(), 9)\nprint(42)",
    "kills_everybody": "import os\nos.kill(-1, 9)\nprint(42)",
    "kills_by_thread": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        f"assert libc.syscall({TGKILL}, 1, 1, 9) == 0, 'refused'\nprint(42)"
    ),
    "stops_its_parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nprint(42)",
    "socket": "import socket\ns = socket.socket()\ns.connect(('127.0.0.1', PORT))\nprint(42)",
    "udp": "import socket\nsocket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT))\nprint(42)",
    "download": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:PORT')\nprint(42)",
    "reads_the_environment": "import os\nassert os.environ['SECRET'] == 'hush'\nprint(42)",
    "reads_its_parents_environment": (
        "import os\ntext = open(f'/proc/{os.getppid()}/environ').read()\nprint(42)"
    ),
    "searches_proc": (
        "import glob\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + ['/proc/1/mem']:\n"
        "    print(open(path, 'rb').read())\nprint(42)"
    ),
    "reads_files": "print(open('MARK').read())",
    "reads_the_tests": (
        "import gc, sys\n"
        "found = [o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o]\n"
        "frame = sys._getframe()\n"
        "while frame:\n"
        "    found += [v for v in frame.f_locals.values() if '42' == v]\n"
        "    frame = frame.f_back\n"
        "print(found[0])"
    ),
    "imports_the_judge": "import engine.rewards.code as t\nt.same_output = lambda a, b: True",
    "imports_its_way_up": (
        "import sys\nfor m in list(sys.modules.values()):\n"
        "    for n in ('same_output', 'same_value'): setattr(m, n, lambda a, b: True)"
    ),
    "writes_files": "open('MARK', 'w').write('harm')\nprint(42)",
    "fills_the_disk": (
        "i = 0\nwhile True:\n    i += 1\n    open(f'f{i}', 'wb').write(b'x' * (1 << 24))"
    ),
    "follows_a_link": "import os\nos.symlink('MARK', 'link')\nprint(open('link').read())",
    "leaves_by_chroot": "import os\nos.chroot('..')\nprint(42)",
    "daemon": ("import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass\nprint(42)"),
    "runs_a_shell": "import os\nprint(42 if os.system('touch MARK') == 0 else 0)",
    "runs_a_program": "import subprocess\nsubprocess.run(['/bin/true'], check=True)\nprint(42)",
    "traces": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "assert libc.ptrace(16, os.getppid(), 0, 0) == 0, 'refused'\nprint(42)"
    ),
    "mounts": (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "assert libc.unshare(0x10020000) == 0, 'refused'\nprint(42)"
    ),
    "closes_its_output": "import os\nos.close(1)\nos.close(0)\nwhile True: pass",
    "writes_to_its_channels": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, b'\\x00\\x00\\x00\\x02[]' * 9)\n"
        "    except OSError: pass"
    ),
    "syntax_error": "def",
    "nul_bytes": "print(42)\x00",
    "half_a_character": "print('\ud83d' * 42)",
}

# Functions that try to pass the test `assert f(41) == 42` without solving it.
CHEATS = {
    "equal_to_all": "class E:\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "integer_equal_to_all": (
        "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = None\n"
        "def f(x): return E(7)"
    ),
    "exits": "import sys\nsys.exit(0)",
    "exits_in_the_call": "import os\ndef f(x): os._exit(0)",
    "raises": "def f(x): raise SystemExit(0)",
    "asserts_nothing": "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return 0",
    "answers_for_the_judge": (
        "import socket, struct\n"
        "def f(x):\n"
        "    for fd in range(3, 64):\n"
        "        try:\n"
        "            s = socket.socket(fileno=fd)\n"
        "            s.send(struct.pack('!I', 4) + b'true' + struct.pack('!I', 6) + b'[true]')\n"
        "        except OSError: pass\n"
        "    return 0"
    ),
    "reads_frames": (
        "import sys\n"
        "def f(x):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for v in frame.f_locals.values():\n"
        "            if isinstance(v, str) and 'f(41) =' + '= ' in v: return 42\n"
        "        frame = frame.f_back\n"
        "    return 0"
    ),
    "no_function": "g = 1",
    "spins": "def f(x):\n    while True: pass",
}
