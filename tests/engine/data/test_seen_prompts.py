"""The compact set of prompts against Python's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.data.decontamination import SeenPrompts

# Few bytes, so that keys repeat, and NULs at the end, which NumPy drops.
KEYS = st.lists(st.binary(max_size=2).map(lambda some: some.ljust(16, b"\0")), max_size=60)


@given(
    keys=KEYS | st.lists(st.integers(0, 40).map(lambda n: bytes([n]) * 16)),
    recent=st.integers(1, 9),
)
def test_a_key_is_new_once(keys: list[bytes], recent: int) -> None:
    seen, known = SeenPrompts(recent), set[bytes]()
    for key in keys:
        assert seen.add(key) == (key not in known)
        known.add(key)
