"""Rows of files and hub datasets: which files are which split, their columns by name, and bad rows.

A dataset of the Hugging Face hub has the address `hf://ID[@REVISION][:SUBSET[:SPLIT]]`: an empty
subset is its default, a split may be a slice such as `train[:10%]`. `MappedRows` streams,
`read_file_rows` returns all.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from jinja2 import StrictUndefined, Template, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config import RowsConfig
from engine.data import rows
from engine.data.cells import SHOWN, is_missing, row_numbers, texts_of
from engine.data.rows import RULE, TRUTH
from engine.errors import ConfigError, DataError, EmptyFileError, EngineError, first_line
from engine.final_answers import DecimalMark, last_boxed, normalise_number
from engine.storage.filesystem import as_path, is_hub_id, is_remote
from engine.storage.json_rows import Numbered, Row
from engine.storage.readers import is_data_file, list_files, open_file, parse_rows, stream_rows

HUB = "hf://"
HUB_TIMEOUT_S = 10.0
_ADDRESS = re.compile(
    r"hf://(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^:@]+))?"
    r"(?::(?P<subset>[^:]*))?(?::(?P<split>.+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubDataset(NamedTuple):
    """What an address names."""

    id: str  # e.g. "openai/gsm8k"
    revision: str  # branch, tag or commit; empty: the main branch
    subset: str  # e.g. "main"; empty: the default
    split: str  # e.g. "train"; empty: none named


def parse_address(address: str) -> HubDataset:
    """The parts of an address; DataError for one of another form."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise DataError(
            f"{address!r} is no dataset of the hub; write hf://ID[@REVISION][:SUBSET[:SPLIT]], "
            "e.g. hf://openai/gsm8k:main:train"
        )
    return HubDataset(**match.groupdict(default=""))


def hub_commit(dataset: HubDataset) -> str:
    """The commit (40 hex digits) that a dataset's revision is now; a commit needs no network.

    Where the hub doesn't answer it is the one that was read last, if there is any.
    """
    if _COMMIT.fullmatch(dataset.revision):
        return dataset.revision
    from datasets import config
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        # Asked with a deadline: a download would wait without end for a silent network.
        revision = dataset.revision or None
        info = HfApi().dataset_info(dataset.id, revision=revision, timeout=HUB_TIMEOUT_S)
    except (OSError, HTTPError, HFValidationError) as error:
        cache = Path(config.HF_DATASETS_CACHE) / dataset.id.replace("/", "___")
        read = [path for path in cache.glob("*/*/*") if _COMMIT.fullmatch(path.name)]
        if read and not dataset.revision:
            return max(read, key=lambda path: path.stat().st_mtime).name
        raise DataError(
            f"the Hugging Face hub gives no dataset {dataset.id!r}"
            f"{f' at {dataset.revision!r}' if dataset.revision else ''} ({type(error).__name__}); "
            "check name, revision and network, or give a folder of its files as the path; "
            "a commit that is in the local cache (hf://ID@COMMIT) needs no network"
        ) from error
    return str(info.sha)


def hub_splits(dataset: HubDataset) -> list[str]:
    """The names of a dataset's splits, e.g. ["train", "test"]."""
    from datasets import get_dataset_split_names

    with _refusals(dataset):
        commit = hub_commit(dataset)
        return get_dataset_split_names(dataset.id, dataset.subset or None, revision=commit)


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
        table = load_dataset(
            dataset.id, dataset.subset or None, split=dataset.split, revision=hub_commit(dataset)
        ).with_format("arrow")
    if not len(table):
        raise EmptyFileError(f"{address} has no rows; name another split")
    batches = (batch.to_pylist() for batch in table.iter(1024))
    yield from enumerate(chain.from_iterable(batches), start=1)


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
        raise DataError(
            f"the dataset {dataset.id!r} of the hub can't be read ({first_line(error)[:300]}); "
            "check subset and split, or download its files and give their folder"
        ) from error
    finally:
        enable_progress_bar()


NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}


def split_addresses(
    path: str, names: Mapping[str, str], *, need_train: bool = True
) -> dict[str, list[str]]:
    """The addresses of each split below `path`; without any known name all is training data.

    `names` says what a split is called there, e.g. {"test": "dev"}. Raises DataError where there is
    nothing to read, or no training data with `need_train`.
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
    if is_hub_id(path):
        path = HUB + path
    splits: dict[str, list[str]] = {}
    if path.startswith(HUB):
        dataset = parse_address(path)
        if dataset.split:
            return {"train": [path]}
        there = hub_splits(dataset)
        head = path if dataset.subset or path.count(":") > 1 else f"{path}:"
        for split, usual in NAMES.items():
            # A slice such as test[:500] is no name of a split, but datasets knows it.
            name = names.get(split) or next((name for name in usual if name in there), "")
            if name:
                splits[split] = [f"{head}:{name}"]
    else:
        is_folder = not is_remote(path) and as_path(path).is_dir()
        if is_data_file(path) and not is_folder:
            return {"train": [path if is_remote(path) else str(Path(as_path(path)).absolute())]}
        files = {uri: PurePosixPath(uri).name for uri in _files_of(path)}
        there = list(files.values())
        for split, usual in NAMES.items():
            known = {names[split].lower()} if split in names else set(usual)
            # {"train", "00000", "of", …} of train-00000-of-00002.parquet
            words = {uri: re.split(r"[^a-z0-9]+", name.lower()) for uri, name in files.items()}
            if uris := [uri for uri in files if known & set(words[uri])]:
                splits[split] = uris
            elif split in names:
                raise DataError(f"data.splits.{split}={names[split]!r} is in the name of no file")
        if not splits:
            return {"train": list(files)}
    if not splits or (need_train and "train" not in splits):
        raise DataError(
            f"data.path={path!r} has no training split among {', '.join(there)}; name one in "
            "data.splits.train"
        )
    return splits


def _data_files_in(folder: str) -> list[str]:
    return sorted(uri for uri in list_files(folder) if is_data_file(uri))


def _files_of(path: str) -> list[str]:
    """The data files of a folder, in `main/` or `data/` below it where it has none itself."""
    for below in ("", "/data", "/main"):
        if files := _data_files_in(path.rstrip("/") + below):
            return files
    raise DataError(
        f"data.path={path!r} is no data file, and no folder with some (looked in it, in data/ and "
        "in main/); give a .jsonl, .json, .csv or .parquet file, a folder, s3://… or hf://ID"
    )


def address_digest(address: str) -> str:
    """SHA-256 of a file's content; of a hub dataset, its commit with subset and split."""
    if address.startswith(HUB):
        dataset = parse_address(address)
        version = f"{dataset.id}@{hub_commit(dataset)}:{dataset.subset}:{dataset.split}"
        return hashlib.sha256(version.encode()).hexdigest()
    with open_file(address) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


LONGEST_TEXT = 4_000_000  # characters of one cell: a million tokens, more than any model reads


class RowMapper:
    """Turns rows of files into canonical rows, as `data.columns` and `data.templates` say.

    >>> config = RowsConfig(columns={"prompt": "input", "ground_truth": "target"})
    >>> row = RowMapper(config)({"input": "1+1?", "target": "2"}, "d.csv, row 1")
    >>> row["prompt"], row["reward_model"]
    ([{'role': 'user', 'content': '1+1?'}], {'style': 'rule', 'ground_truth': '2'})
    """

    def __init__(self, config: RowsConfig) -> None:
        """Raise ConfigError for a template that is not one."""
        self._config = config
        sandbox = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, finalize=lambda value: "" if value is None else value
        )
        sandbox.filters |= {"boxed": boxed, "number": number, "required": required}
        self._templates: dict[str, Template] = {}
        for column, text in config.templates.items():
            try:
                self._templates[column] = sandbox.from_string(text)
            except TemplateSyntaxError as error:
                raise ConfigError(
                    f"data.templates.{column} is not a Jinja2 template (line {error.lineno}: "
                    f"{error.message}); correct it"
                ) from None

    def __call__(self, raw: Row, where: str) -> Row:
        """One canonical row; DataError that begins with `where` for a row that has none."""
        row = self.named(raw, where)
        if "prompt" not in row:
            raise DataError(
                f"{where}: there is no column 'prompt'; name one of {sorted(raw)} in data.columns, "
                "e.g. data.columns.prompt=question"
            )
        if self._config.data_source and is_missing(row.get("data_source")):
            row["data_source"] = self._config.data_source
        canonical = rows.canonical_row(row, where)
        return canonical | {"prompt": self.with_system(canonical["prompt"])}

    def named(self, raw: Row, where: str) -> Row:
        """The row with our columns, whatever it holds; DataError for text that no model reads."""
        columns = self._config.columns
        mapped = {}
        for column, path in columns.items():
            try:
                mapped[column] = _value(raw, path)
            except KeyError:
                raise DataError(
                    f"{where}: there is no column {path!r} for data.columns.{column}; its columns "
                    f"are {sorted(raw)}"
                ) from None
        # A column that gives its name to another one is replaced by it.
        replaced = {*columns, *columns.values()}
        row = {column: value for column, value in raw.items() if column not in replaced} | mapped
        values = raw | row
        for column, template in self._templates.items():
            try:
                row[column] = template.render(values)
            except Exception as error:  # whatever a template does with what the data hold
                raise DataError(
                    f"{where}: data.templates.{column} can't be rendered ({type(error).__name__}: "
                    f"{first_line(error)[:200]}); its columns are {sorted(values)}"
                ) from error
        for column, value in row.items():
            _check_text(value, column, where)
        return row

    def with_system(self, prompt: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
        """The prompt, with `data.system_prompt` before it where it has no system message."""
        if not self._config.system_prompt or prompt[0]["role"] == "system":
            return prompt
        return [{"role": "system", "content": self._config.system_prompt}, *prompt]


def boxed(text: str) -> str:
    """The filter `boxed`: what is in the last `\\boxed{…}` or `\\fbox{…}`; ValueError for none."""
    content = last_boxed(text)
    if content is None:
        raise ValueError("there is no \\boxed{…}")
    return content


def number(text: str, decimal_mark: DecimalMark = ".") -> str:
    """The filter `number`: a number in plain digits, as graders read it; ValueError for none."""
    plain = normalise_number(text, decimal_mark)
    if plain is None:
        raise ValueError(f"{text[:50]!r} is no number")
    return plain


def required(text: str, part: str) -> str:
    """The filter `required`: the text itself; ValueError where it doesn't hold `part`."""
    if part not in text:
        raise ValueError(f"there is no {part!r}")
    return text


def _value(raw: Row, path: str) -> object:
    if path in raw:
        return raw[path]
    value: object = raw
    for name in path.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(path)
        value = value[name]
    return value


def _check_text(value: object, column: str, where: str) -> None:
    """Refuse text that no model reads: with a NUL, or of megabytes."""
    for text in texts_of(value) if isinstance(value, str) or column in rows.CONVERSATIONS else ():
        if len(text) > LONGEST_TEXT:
            raise DataError(
                f"{where}: column {column!r} has {len(text):,} characters, more than "
                f"{LONGEST_TEXT:,}; shorten or remove it"
            )
        if "\0" in text:
            raise DataError(
                f"{where}: column {column!r} has a NUL character at {text.index(chr(0))}; remove it"
            )


class MappedRows:
    """The canonical rows at an address, with their numbers, to be iterated over once.

    Raises DataError for what is wrong with the file as a whole, at its end for bad rows, which
    `config.bad_rows=drop` only counts (a file without rows has one), and StorageError.
    """

    def __init__(
        self,
        address: str,
        config: RowsConfig,
        *,
        need_truth: bool = False,
        mapper: Callable[[Row, str], Row] | None = None,
        content: bytes | None = None,
    ) -> None:
        """`mapper` makes rows canonical (None: RL rows); `content`: of a file that was read."""
        self.address, self._content = address, content
        self._policy, self._need_truth = config.bad_rows, need_truth
        self._map = mapper or RowMapper(config)
        self._total = 0  # rows seen, good ones too
        self.bad = 0
        self._numbers: list[int] = []  # of the first bad ones
        self._first = ""  # why the first one is bad

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        if self._content is not None:
            numbered = parse_rows(self._content, self.address)
        elif self.address.startswith(HUB):
            numbered = hub_rows(self.address)
        else:
            numbered = stream_rows(self.address)
        try:
            for number, raw in numbered:
                self._total += 1
                try:
                    row = self._mapped(raw, f"{self.address}, row {number}")
                except DataError as error:
                    self._refuse(number, error)
                    continue
                yield number, row
        except EmptyFileError as error:
            self.bad, self._total, self._first = 1, 1, str(error)
        if not self.bad or self._policy == "drop":
            return
        if self.bad == 1:
            raise DataError(f"{self._first}; or leave it out with data.bad_rows=drop")
        raise DataError(
            f"{self._first}; {self.bad} of {self._total} rows are bad "
            f"({row_numbers(self._numbers)}): correct them, or leave them out with "
            "data.bad_rows=drop"
        )

    def _mapped(self, raw: Row | DataError, where: str) -> Row:
        if isinstance(raw, DataError):
            raise raw
        row = self._map(raw, where)
        if self._need_truth and row[RULE][TRUTH] is None:
            raise DataError(
                f"{where}: there is no ground truth; give {RULE}.{TRUTH}, or name its column in "
                "data.columns"
            )
        return row

    def refuse_without_truth(self, numbers: Sequence[int]) -> None:
        """Count rows that were given out as bad: they have no ground truth, and others have."""
        error = DataError(
            f"{self.address}: {len(numbers)} of {self._total} rows have no ground truth "
            f"({row_numbers(numbers)}); give {RULE}.{TRUTH} in all rows or in none"
        )
        if self._policy == "fail":
            raise error
        for number in numbers:
            self._refuse(number, error)

    def _refuse(self, number: int, error: DataError) -> None:
        self.bad += 1
        self._first = self._first or str(error)
        if len(self._numbers) <= SHOWN:
            self._numbers.append(number)

    def notes(self) -> list[str]:
        """What was left out and why, in a sentence for a log; none where nothing was."""
        if not self.bad:
            return []
        if not self._numbers:
            return [f"left out: {self._first}"]
        return [
            f"{self.address}: {self.bad} of {self._total} rows are bad and left out "
            f"({row_numbers(self._numbers)}); the first: {self._first}"
        ]


@dataclass(frozen=True, slots=True)
class FileRows:
    """The good rows of a file."""

    address: str
    rows: list[Row]
    numbers: list[int]  # of the rows in the file, from 1
    notes: list[str]  # what was left out, a sentence; may be empty


def read_file_rows(address: str, config: RowsConfig) -> FileRows:
    """Read all rows of a file, an s3:// object or a dataset of the hub in canonical form.

    All get the same columns, None where a row has none. Where only some have a ground truth, the
    others are bad. Raises as `MappedRows` does.
    """
    mapped = MappedRows(address, config)
    numbered = list(mapped)
    missing = [number for number, row in numbered if row[RULE][TRUTH] is None]
    if missing and len(missing) < len(numbered):
        mapped.refuse_without_truth(missing)
        numbered = [(number, row) for number, row in numbered if row[RULE][TRUTH] is not None]
    good = rows.same_columns([row for _, row in numbered])
    return FileRows(address, good, [number for number, _ in numbered], mapped.notes())


def data_files(address: str) -> list[str]:
    """The files of an address: itself, or of a folder the data files right in it, at least one."""
    is_folder = not is_remote(address) and as_path(address).is_dir()
    if address.startswith(HUB) or is_data_file(address) or not (is_remote(address) or is_folder):
        return [address]
    if files := _data_files_in(address):
        return files
    raise DataError(f"{address} holds no data files; give a file, or a folder with some")
