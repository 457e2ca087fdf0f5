"""How a sandbox and its owner speak: frames of JSON, and Python values in JSON.

JSON, never pickle: what comes from a sandbox is anybody's.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

LONGEST = 8 << 20  # bytes of a frame


class Closed(Exception):
    """The other end is gone, late, or sent what is no message."""


def send(channel: socket.socket, message: object, seconds: float = 60.0) -> None:
    """Send a message; raise Closed where it isn't taken in time."""
    data = json.dumps(message).encode()
    if len(data) > LONGEST:
        raise Closed("too long")
    channel.settimeout(max(0.001, seconds))
    try:
        channel.sendall(struct.pack("!I", len(data)) + data)
    except OSError as error:
        raise Closed(str(error)) from None


def receive(channel: socket.socket, seconds: float) -> Any:
    """The next message; raise Closed where none comes in time, or it is none."""
    until = time.monotonic() + seconds
    (length,) = struct.unpack("!I", _read(channel, 4, until))
    if length > LONGEST:
        raise Closed("too long")
    try:
        return json.loads(_read(channel, length, until))
    except (ValueError, RecursionError) as error:
        raise Closed(str(error)) from None


def _read(channel: socket.socket, count: int, until: float) -> bytes:
    parts = b""
    while len(parts) < count:
        left = until - time.monotonic()
        if left <= 0 or not select.select([channel], [], [], left)[0]:
            raise Closed("late")
        try:
            some = channel.recv(min(count - len(parts), 1 << 16))
        except OSError as error:
            raise Closed(str(error)) from None
        if not some:
            raise Closed("gone")
        parts += some
    return parts


def encode(value: object, other: Callable[[object], object]) -> object:
    """A value as JSON that `decode` reads; `other` makes JSON of what has no such form."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return ["i", hex(value)]
    if isinstance(value, float):
        return ["f", float(value).hex()]
    if isinstance(value, str):
        return ["s", str(value)]
    if isinstance(value, bytes):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    for tag, kind in _KINDS.items():
        if isinstance(value, kind):
            return [tag, [encode(one, other) for one in value]]
    if isinstance(value, dict):
        pairs = [[encode(key, other), encode(one, other)] for key, one in value.items()]
        return ["d", pairs]
    return other(value)


def decode(coded: Any, other: Callable[[Any], object]) -> Any:
    """The value of `encode`; raise ValueError for what is none."""
    if coded is None or isinstance(coded, bool):
        return coded
    try:
        tag, first = coded[0], coded[1]
        if tag in _SIMPLE:
            return _SIMPLE[tag](first)
        if tag == "c":
            return complex(float.fromhex(first), float.fromhex(coded[2]))
        if tag in _KINDS:
            return _KINDS[tag](decode(one, other) for one in first)
        if tag == "d":
            return {decode(key, other): decode(one, other) for key, one in first}
        return other(coded)
    except (TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"no value: {error}") from None


_KINDS: dict[str, Any] = {"l": list, "t": tuple, "S": set, "F": frozenset}
_SIMPLE: dict[str, Callable[[str], object]] = {
    "i": lambda text: int(text, 16),
    "f": float.fromhex,
    "s": str,
    "b": bytes.fromhex,
}
