"""The compiled loops of decoding, `cpu/step.c`: see `engine.compiled`."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

from engine.compiled import compiled


@cache
def library() -> ctypes.CDLL | None:
    """`cpu/step.c`, compiled; None where that can't be done or used."""
    found = compiled(Path(__file__).parent / "cpu" / "step.c")
    if found is None:
        return None
    found.decode_step.argtypes = [c_void_p, c_void_p, c_int64]
    found.decode_step.restype = None
    found.scratch_bytes.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    found.scratch_bytes.restype = c_int64
    found.sample_rows.argtypes = [
        *(c_void_p, c_int64, c_int64, c_double),  # logits, rows, size, temperature
        *(c_void_p, c_void_p, c_int64),  # keys, columns, threads
        *(c_void_p, c_void_p, c_void_p),  # sums, tokens, log-probs
    ]
    found.sample_rows.restype = None
    return found
