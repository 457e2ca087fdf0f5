"""The Parquet files of a run's samples, one a step and split, in a folder or at an s3:// address.

A row is a completion, with one value a token in its lists. A file's metadata has the metrics of the
steps since the file before it, so that the folder alone has the run's curves. Loads no torch.
"""

import contextlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine.errors import DataError, StorageError, first_line
from engine.storage.filesystem import PATIENT, Files, as_path, is_remote, translated

TRAIN, VALIDATION = "train", "validation"
COMPONENT = "reward."  # before the name of a reward's component, in the name of its column

# One number a token of the completion; null where nothing of the run computed it.
TOKEN_VALUES = (
    "advantages",
    "rollout_log_probs",  # the tokens were sampled with
    "old_log_probs",  # by the trainer, before the update
    "ref_log_probs",  # by the frozen reference
    "values",  # the critic's
)

CALL = pa.struct([("name", pa.string()), ("arguments", pa.string())])  # arguments: JSON
TURN = pa.struct(
    [
        ("start", pa.int32()),  # of its sampled tokens among the response's
        ("stop", pa.int32()),  # the last one + 1
        ("reward", pa.float32()),  # the environment's
        ("calls", pa.list_(CALL)),
        ("malformed", pa.list_(pa.string())),  # a sentence for each call that can't be read
    ]
)

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("split", pa.string()),  # TRAIN or VALIDATION
        ("group", pa.int64()),  # completions of one prompt have one number
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float32()),  # as given
        ("shaped_reward", pa.float32()),  # what advantages are made of; null in validation
        ("correct", pa.bool_()),
        ("has_format", pa.bool_()),
        ("truncated", pa.bool_()),
        ("reward_error", pa.string()),  # why the reward failed, or ""
        ("policy_version", pa.int64()),
        ("token_ids", pa.list_(pa.int64())),
        ("tokens", pa.list_(pa.string())),
        *((name, pa.list_(pa.float32())) for name in TOKEN_VALUES),
        ("token_versions", pa.list_(pa.int64())),  # null where all are `policy_version`
        # Columns of episodes; null for single completions.
        ("trained", pa.list_(pa.bool_())),  # a token counts in the loss
        ("turns", pa.list_(TURN)),  # of this row; an episode may have several rows
        ("first_turn", pa.int64()),
        ("episode_turns", pa.int64()),
        ("episode_reward", pa.float32()),  # the environment's, all turns together
        ("end", pa.string()),  # done, failed, or the limit that was reached
        ("episode_error", pa.string()),
        ("episode_info", pa.string()),  # JSON
        ("environment_seconds", pa.float32()),
    ]
)
"""Beside these, `reward.NAME` (float32) for each component of the reward."""


FOLDER = "rollouts"  # of a run, below what it leaves
PAGE = "rollouts.html"
_NAME = re.compile(rf"({TRAIN}|{VALIDATION})_(\d+)\.parquet")
_METRICS = b"hybridflyte.metrics"  # key of a file's metadata

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, order=True)
class SampleName:
    """The step and split of the sample in a file."""

    step: int
    split: str  # TRAIN or VALIDATION

    @property
    def file(self) -> str:
        """The file's name, e.g. `train_000010.parquet`."""
        return f"{self.split}_{self.step:06d}.parquet"


class SampleFolder:
    """A folder of samples; raises StorageError, and DataError for a file that is no sample."""

    def __init__(self, uri: str | Path) -> None:
        with _explained("use", str(uri)):
            self._files = Files(uri, PATIENT)
        self.uri = self._files.uri

    def names(self) -> list[SampleName]:
        """The names of the samples that are there, by step."""
        with _explained("read", self.uri):
            entries = self._files.entries()
        matches = (_NAME.fullmatch(entry["name"].rpartition("/")[2]) for entry in entries)
        return sorted(SampleName(int(match[2]), match[1]) for match in matches if match)

    def read_bytes(self, name: str) -> bytes:
        with _explained("read", f"{self.uri}/{name}"):
            return self._files.read(name)

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file whole or not at all."""
        with _explained("write", f"{self.uri}/{name}"):
            self._files.write(name, content)

    def read(self, name: SampleName) -> tuple[pa.Table, list[dict[str, float]]]:
        """A sample, and the metrics that its file has."""
        content = self.read_bytes(name.file)
        try:
            table = pq.read_table(io.BytesIO(content))
            metadata = table.schema.metadata or {}
            return table, json.loads(metadata.get(_METRICS, b"[]"))
        except (pa.ArrowException, ValueError) as error:
            raise DataError(
                f"{self.uri}/{name.file} is no readable sample of rollouts: "
                f"{first_line(error)}; remove it"
            ) from error

    def remove(self, name: SampleName) -> None:
        """Delete a sample; one that isn't there is as good."""
        path, address = self._files.path_of(name.file), f"{self.uri}/{name.file}"
        with contextlib.suppress(FileNotFoundError), _explained("remove", address):
            self._files.request(lambda: self._files.fs.rm_file(path))


def as_bytes(table: pa.Table, metrics: Sequence[Metrics]) -> bytes:
    """A sample and the metrics of some steps as the content of a Parquet file."""
    finite = [{k: float(v) for k, v in row.items() if math.isfinite(v)} for row in metrics]
    metadata = {**(table.schema.metadata or {}), _METRICS: json.dumps(finite).encode()}
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
    return buffer.getvalue()


def find_samples(uri: str | Path) -> SampleFolder:
    """The samples of a folder, or of a run's `rollouts`; DataError without any."""
    for address in (str(uri), f"{str(uri).rstrip('/')}/{FOLDER}"):
        folder = SampleFolder(address)
        if folder.names():
            return folder
    if not is_remote(uri) and not as_path(uri).exists():
        raise DataError(f"{uri} does not exist; check the path of the run's folder")
    raise DataError(
        f"{uri} has no samples of rollouts; give the folder of a run or of its artifact `rl`, "
        "whose settings have trainer.log_rollouts_freq above 0"
    )


def copy_samples(source: str | Path, target: str | Path, up_to: int | None = None) -> None:
    """Copy the samples up to a step (None: all, and the page) from one folder to another."""
    origin, copy = SampleFolder(source), SampleFolder(target)
    names = origin.names()
    for name in names:
        if up_to is None or name.step <= up_to:
            copy.write_bytes(name.file, origin.read_bytes(name.file))
    if names and up_to is None:
        with contextlib.suppress(FileNotFoundError):
            copy.write_bytes(PAGE, origin.read_bytes(PAGE))


def _explained(action: str, uri: str) -> AbstractContextManager[None]:
    return translated(uri, StorageError, action, keep=(FileNotFoundError,))
