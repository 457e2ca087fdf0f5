"""Windows over a dated prefix: what is new at a moment, on a disk and in S3."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_server import flyte_variables, s3_server

from engine.config import RowsConfig
from engine.data import incremental_data
from engine.data.incremental_data import DataFile, NewFiles, find_new_files, read_new_files
from engine.data.rows import rl_row
from engine.errors import ConfigError, DataError
from engine.storage.filesystem import Files

NIGHT = datetime(2026, 11, 20, 2, tzinfo=UTC)
MONTH = 30


def put(prefix: Path, path: str, numbers: list[int], written: datetime) -> None:
    """Write a file of problems, and say when it was written."""
    file = prefix / path
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [rl_row("sums", f"What is {n} plus 1?", str(n + 1), {"n": n}) for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(file, (written.timestamp(),) * 2)


def paths(new_files: NewFiles) -> list[str]:
    return [file.path for file in new_files.files]


def test_what_was_written_up_to_the_kick_off_is_new(tmp_path: Path) -> None:
    put(tmp_path, "2026-11-18/a.jsonl", [1], NIGHT - timedelta(days=2))
    put(tmp_path, "dt=2026-11-19/deep/b.jsonl", [2, 3], NIGHT - timedelta(hours=4))
    put(tmp_path, "2026-11-20/early.jsonl", [4], NIGHT)
    put(tmp_path, "2026-11-20/after.jsonl", [5], NIGHT + timedelta(seconds=1))
    new_files = find_new_files(str(tmp_path), NIGHT, [], MONTH)
    assert paths(new_files) == [
        "2026-11-18/a.jsonl",
        "2026-11-20/early.jsonl",
        "dt=2026-11-19/deep/b.jsonl",
    ]
    rows, notes = read_new_files(new_files, RowsConfig())
    assert [row["extra_info"]["n"] for row in rows] == [1, 4, 2, 3]
    assert not notes
    assert (new_files.late, new_files.known, new_files.waiting) == (0, 0, 1)


def test_what_is_no_new_file(tmp_path: Path) -> None:
    early = NIGHT - timedelta(hours=1)
    for path in (
        "loose.jsonl",
        "2026-11-19/.part.jsonl",
        "2026-11-19/_SUCCESS.jsonl",
        "2026-11-19/notes.txt",
        "2026-13-01/a.jsonl",
        "archive/2026-11-19/a.jsonl",
        "2026-11-21/future.jsonl",
        "2026-10-20/old.jsonl",
    ):
        put(tmp_path, path, [1], early)
    assert find_new_files(str(tmp_path), NIGHT, [], MONTH).files == ()
    assert paths(find_new_files(str(tmp_path), NIGHT, [], MONTH + 1)) == ["2026-10-20/old.jsonl"]


def test_late_data_are_taken_once(tmp_path: Path) -> None:
    put(tmp_path, "2026-11-19/a.jsonl", [1], NIGHT - timedelta(hours=3))
    first = find_new_files(str(tmp_path), NIGHT, [], MONTH)
    put(tmp_path, "2026-11-17/late.jsonl", [2], NIGHT + timedelta(hours=5))
    assert find_new_files(str(tmp_path), NIGHT, [], MONTH) == first
    second = find_new_files(str(tmp_path), NIGHT + timedelta(days=1), first.files, MONTH)
    assert (paths(second), second.late, second.known) == (["2026-11-17/late.jsonl"], 1, 1)
    ledger = [*first.files, *second.files]
    assert find_new_files(str(tmp_path), NIGHT + timedelta(days=2), ledger, MONTH).files == ()


def test_content_counts_and_not_the_name(tmp_path: Path) -> None:
    put(tmp_path, "2026-11-18/a.jsonl", [1], NIGHT - timedelta(days=1))
    ledger = find_new_files(str(tmp_path), NIGHT, [], MONTH).files
    put(tmp_path, "2026-11-19/copy.jsonl", [1], NIGHT - timedelta(hours=2))
    put(tmp_path, "2026-11-18/a.jsonl", [1], NIGHT - timedelta(hours=1))  # touched
    again = find_new_files(str(tmp_path), NIGHT, ledger, MONTH)
    assert (again.files, again.known) == ((), 2)
    put(tmp_path, "2026-11-18/a.jsonl", [7], NIGHT - timedelta(hours=1))
    assert paths(find_new_files(str(tmp_path), NIGHT, ledger, MONTH)) == ["2026-11-18/a.jsonl"]


def test_a_kick_off_without_a_zone_is_utc(tmp_path: Path) -> None:
    put(tmp_path, "2026-11-20/a.jsonl", [1], NIGHT)
    assert find_new_files(str(tmp_path), NIGHT.replace(tzinfo=None), [], MONTH).files
    before = NIGHT.replace(tzinfo=None) - timedelta(seconds=1)
    assert not find_new_files(str(tmp_path), before, [], MONTH).files


def test_a_file_that_changes_under_the_run_is_told(tmp_path: Path) -> None:
    put(tmp_path, "2026-11-19/a.jsonl", [1], NIGHT)
    new_files = find_new_files(str(tmp_path), NIGHT, [], MONTH)
    put(tmp_path, "2026-11-19/a.jsonl", [2], NIGHT)
    with pytest.raises(DataError, match=r"a\.jsonl was written again while"):
        read_new_files(new_files, RowsConfig())


def test_no_prefix_and_none_that_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"retrain\.path is empty"):
        find_new_files("", NIGHT, [], MONTH)
    with pytest.raises(DataError, match=r"retrain\.path=.*nowhere.* does not exist"):
        find_new_files(str(tmp_path / "nowhere"), NIGHT, [], MONTH)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=12, unique=True
    ),
    st.lists(st.booleans(), min_size=13, max_size=13),
)
def test_every_file_is_taken_by_one_promoted_night(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[tuple[int, int]],
    promoted: list[bool],
) -> None:
    """Files of day d that are written d' days later, over nights of which some promote."""
    prefix, start = tmp_path_factory.mktemp("prefix"), NIGHT
    for number, (day, delay) in enumerate(files):
        name = f"{start + timedelta(days=day):%Y-%m-%d}/{number}.jsonl"
        put(prefix, name, [number], start + timedelta(days=day + delay, hours=-1))
    ledger: list[DataFile] = []
    for night, promotes in enumerate([*promoted, *[True] * 12]):
        new_files = find_new_files(str(prefix), start + timedelta(days=night), ledger, MONTH)
        if promotes:
            ledger += new_files.files
    assert len(ledger) == len({file.path for file in ledger}) == len(files)


@pytest.fixture(params=["AWS", "FLYTE_AWS"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket that is known by AWS's own variables, or by those that Flyte gives its pods."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with s3_server() as endpoint:
        variables = flyte_variables(endpoint)
        if request.param == "AWS":
            variables = {"AWS_ENDPOINT_URL": endpoint} | {
                name.removeprefix("FLYTE_"): value for name, value in variables.items()
            }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        Files("s3://arrivals").fs.makedirs("arrivals", exist_ok=True)
        yield "s3://arrivals/problems"


def test_a_prefix_in_s3(bucket: str) -> None:
    row = json.dumps(rl_row("sums", "What is 1 plus 1?", "2", {}))
    Files(bucket).fs.pipe_file(f"{bucket}/2026-11-19/a.jsonl", row.encode())
    now = datetime.now(UTC)
    days = (now.date() - NIGHT.date()).days + MONTH + 400
    new_files = find_new_files(bucket, now + timedelta(minutes=5), [], days)
    assert paths(new_files) == ["2026-11-19/a.jsonl"]
    ((taken,), _) = read_new_files(new_files, RowsConfig())
    assert taken["reward_model"]["ground_truth"] == "2"
    assert find_new_files(bucket, now - timedelta(hours=1), [], days).files == ()
    assert find_new_files(bucket, now + timedelta(minutes=5), new_files.files, days).known == 1


def test_what_is_read_is_what_was_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "2026-11-18/a.jsonl", [1, 2], NIGHT)
    new_files = find_new_files(str(tmp_path), NIGHT, [], MONTH)

    def read_and_rewrite(uri: str) -> bytes:
        data = Path(uri).read_bytes()
        put(tmp_path, "2026-11-18/a.jsonl", [3], NIGHT)
        return data

    monkeypatch.setattr(incremental_data, "read_bytes", read_and_rewrite)
    rows, _ = read_new_files(new_files, RowsConfig())
    assert [row["extra_info"]["n"] for row in rows] == [1, 2]
