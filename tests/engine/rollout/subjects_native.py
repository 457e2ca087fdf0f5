"""The native engine on one rank, over each model shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from rollout_models import CONTEXT, FAMILIES, GENERIC, Subject, build
from rollout_subjects import subject

from engine.rollout.protocol import create_engine


def _open(family: str) -> Iterator[Subject]:
    model = build(family)
    engine = create_engine(
        "native", model, max_num_seqs=16, max_model_len=CONTEXT, kv_cache_memory_mb=64, seed=0
    )
    yield Subject(engine, model, f"native-{family}")
    engine.close()


for _family in FAMILIES + GENERIC:
    # What these two have of their own, other tests of the engine decode with.
    _marks = (pytest.mark.slow,) if _family in ("llama", "mistral") else ()
    subject(f"native-{_family}", marks=_marks)(partial(_open, _family))
