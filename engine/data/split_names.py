"""Which files, or splits of a hub dataset, are train, validation and test; and what they hold."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

from engine.data.hub_dataset import HUB, hub_commit, hub_splits, parse_address
from engine.errors import DataError
from engine.storage.filesystem import as_path, is_remote
from engine.storage.readers import is_data_file, list_files, open_file

NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+([@:].+)?")


def split_addresses(
    path: str, names: Mapping[str, str], *, need_train: bool = True
) -> dict[str, list[str]]:
    """The addresses of each split below `path`; with `need_train` that is one of them.

    `names` says what a split is called there, e.g. {"test": "dev"}. Without any known name all of
    it is training data. Raises DataError where there is nothing to read.
    """
    if unknown := sorted(names.keys() - NAMES.keys()):
        raise DataError(
            f"data.splits.{unknown[0]} is no split; the names of {', '.join(NAMES)} can be given"
        )
    if not path:
        raise DataError(
            "data.path is empty; with data.source=files give a file, a folder, an s3:// prefix or "
            "hf://ID"
        )
    if not is_remote(path) and not as_path(path).exists() and _HUB_ID.fullmatch(path):
        path = HUB + path
    if path.startswith(HUB):
        return _hub_addresses(path, names, need_train)
    if is_data_file(path) and not (not is_remote(path) and as_path(path).is_dir()):
        return {"train": [path if is_remote(path) else str(Path(as_path(path)).absolute())]}
    files = _files_of(path)
    found = _by_name({uri: _words(uri) for uri in files}, names)
    if not found:
        return {"train": files}
    return _checked(found, path, [PurePosixPath(uri).name for uri in files], need_train)


def _files_of(path: str) -> list[str]:
    """The data files of a folder, in `main/` or `data/` below it where it has none itself."""
    for place in (path.rstrip("/"), f"{path.rstrip('/')}/data", f"{path.rstrip('/')}/main"):
        if files := sorted(uri for uri in list_files(place) if is_data_file(uri)):
            return files
    raise DataError(
        f"data.path={path!r} is no data file, and no folder with some (looked in it, in data/ and "
        "in main/); give a .jsonl, .json, .csv or .parquet file, a folder, s3://… or hf://ID"
    )


def _words(uri: str) -> set[str]:
    """The words of a file's name: {"train", "00000", "of", …} of train-00000-of-00002.parquet."""
    return set(re.split(r"[^a-z0-9]+", PurePosixPath(uri).name.lower()))


def _by_name(words: Mapping[str, set[str]], names: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for split, usual in NAMES.items():
        known = {names[split].lower()} if split in names else set(usual)
        if uris := [uri for uri, own in words.items() if known & own]:
            found[split] = uris
        elif split in names:
            raise DataError(f"data.splits.{split}={names[split]!r} is in the name of no file")
    return found


def _hub_addresses(
    address: str, names: Mapping[str, str], need_train: bool
) -> dict[str, list[str]]:
    dataset = parse_address(address)
    if dataset.split:
        return {"train": [address]}
    there = hub_splits(dataset)
    head = address if dataset.subset or address.count(":") > 1 else f"{address}:"
    found: dict[str, list[str]] = {}
    for split, usual in NAMES.items():
        wanted = [names[split]] if split in names else [n for n in usual if n in there][:1]
        # A slice such as test[:500] is none of the names, but datasets knows it.
        if wanted:
            found[split] = [f"{head}:{wanted[0]}"]
    return _checked(found, address, there, need_train)


def _checked(
    found: dict[str, list[str]], path: str, there: Iterable[str], need_train: bool
) -> dict[str, list[str]]:
    if not found or (need_train and "train" not in found):
        raise DataError(
            f"data.path={path!r} has no training split among {', '.join(there)}; name one in "
            "data.splits.train"
        )
    return found


def address_digest(address: str) -> str:
    """SHA-256 of a file's content; of a hub dataset, its commit with subset and split."""
    if address.startswith(HUB):
        dataset = parse_address(address)
        named = f"{dataset.id}@{hub_commit(dataset)}:{dataset.subset}:{dataset.split}"
        return hashlib.sha256(named.encode()).hexdigest()
    with open_file(address) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
