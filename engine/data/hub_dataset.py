"""Datasets of the Hugging Face hub as rows: `hf://openai/gsm8k:main:train`.

An address is `hf://ID[@REVISION][:SUBSET[:SPLIT]]`; an empty subset is the dataset's default, and a
split may be a slice such as `train[:10%]`. The library `datasets` finds the files, downloads them
and keeps them on the disk, where rows are read a batch at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.errors import DataError, EmptyFileError, EngineError
from engine.storage.json_rows import Numbered

HUB = "hf://"
HUB_TIMEOUT_S = 10.0
_BATCH_ROWS = 1024
_ADDRESS = re.compile(
    r"hf://(?P<id>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[^:@]+))?(:(?P<subset>[^:]*))?(:(?P<split>.+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """What an address names."""

    id: str  # e.g. "openai/gsm8k"
    revision: str  # branch, tag or commit; empty: the main branch
    subset: str  # e.g. "main"; empty: the default
    split: str  # e.g. "train"; empty: none named


def parse_address(address: str) -> HubDataset:
    """The parts of an address; DataError for one of another form."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise DataError(
            f"{address!r} is no dataset of the hub; write hf://ID[@REVISION][:SUBSET[:SPLIT]], "
            "e.g. hf://openai/gsm8k:main:train"
        )
    parts = {name: found[name] or "" for name in ("id", "revision", "subset", "split")}
    return HubDataset(**parts)


def hub_commit(dataset: HubDataset) -> str:
    """The commit (40 hex digits) that a dataset's revision is now; a commit needs no network."""
    if _COMMIT.fullmatch(dataset.revision):
        return dataset.revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        # Asked with a deadline: a download would wait without end for a silent network.
        found = HfApi().dataset_info(
            dataset.id, revision=dataset.revision or None, timeout=HUB_TIMEOUT_S
        )
    except (OSError, HTTPError, HFValidationError) as error:
        raise DataError(
            f"the Hugging Face hub gives no dataset {dataset.id!r}"
            f"{f' at {dataset.revision!r}' if dataset.revision else ''} ({type(error).__name__}); "
            "check name, revision and network; a commit that is in the local cache "
            "(hf://ID@COMMIT) needs no network"
        ) from error
    return str(found.sha)


def hub_splits(dataset: HubDataset) -> list[str]:
    """The names of a dataset's splits, e.g. ["train", "test"]."""
    from datasets import get_dataset_split_names

    with _refusals(dataset):
        names = get_dataset_split_names(
            dataset.id, dataset.subset or None, revision=hub_commit(dataset)
        )
    return [str(name) for name in names]


def hub_rows(address: str) -> Iterator[Numbered]:
    """The rows of a split, numbered from 1. DataError where hub and cache don't have it."""
    dataset = parse_address(address)
    if not dataset.split:
        raise DataError(
            f"{address!r} names no split; write {HUB}ID:SUBSET:SPLIT, with one of "
            f"{', '.join(hub_splits(dataset))}"
        )
    from datasets import load_dataset

    with _refusals(dataset):
        table: Any = load_dataset(
            dataset.id,
            dataset.subset or None,
            split=dataset.split,
            revision=hub_commit(dataset),
        ).with_format("arrow")
    number = 0
    for batch in table.iter(_BATCH_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield number, row
    if not number:
        raise EmptyFileError(f"{address} has no rows; name another split")


@contextmanager
def _refusals(dataset: HubDataset) -> Iterator[None]:
    """What `datasets` raises as one sentence, and none of its progress bars."""
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar

    disable_progress_bar()
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # it raises errors of many libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DataError(
            f"the dataset {dataset.id!r} of the hub can't be read ({reason}); check subset and "
            "split, or download its files and give their folder"
        ) from error
    finally:
        enable_progress_bar()
