"""A real Chromium, driven over its DevTools socket: load a page, run JavaScript, press keys.

Needs the `chromium` program (Debian's package of that name); `find_chromium` tells.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
START_SECONDS, ANSWER_SECONDS = 60.0, 30.0
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}


def find_chromium() -> str | None:
    """The browser's program: $CHROMIUM, or one on the path; None where there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab; what it asked the network for and what it complained of are kept."""

    def __init__(self, socket: ClientConnection) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._loaded = False
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; fail after ANSWER_SECONDS."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            message = self._receive(end)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result

    def _receive(self, end: float) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=end - time.monotonic()))
        method, values = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(values["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.complaints.append(values["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {values['message']}")
        return message

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self._load("Page.navigate", url=path.as_uri())

    def reload(self) -> None:
        """Load the same address again."""
        self._load("Page.reload")

    def _load(self, method: str, **parameters: Any) -> None:
        self._loaded = False
        self.requests.clear()
        self.call(method, **parameters)
        end = time.monotonic() + ANSWER_SECONDS
        while not self._loaded:
            self._receive(end)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"key": key, "code": "Space" if key == " " else key}
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, windowsVirtualKeyCode=KEYS[key], **code, **more
            )

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def scheme(self, name: str) -> None:
        """Prefer `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser(program: str) -> Iterator[Page]:
    """Start a Chromium with a profile of its own, and yield its tab; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                program,
                *FLAGS,
                f"--user-data-dir={profile}",
                "--window-size=1280,900",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_socket(Path(profile), process), max_size=64 << 20) as socket:
                yield Page(socket)
        finally:
            process.kill()
            process.wait()


def _socket(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until the browser listens; return the address of its tab."""
    import urllib.request

    end = time.monotonic() + START_SECONDS
    file = profile / "DevToolsActivePort"
    while time.monotonic() < end:
        assert process.poll() is None, f"Chromium ended with status {process.returncode}"
        if file.is_file() and (port := file.read_text().partition("\n")[0]):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                address: str = tabs[0]["webSocketDebuggerUrl"]
                return address
        time.sleep(0.1)
    raise TimeoutError(f"Chromium did not listen within {START_SECONDS:g} s")
