"""Retraining: the moment of a kick-off, which arrived rows are new, and what is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.interaction.click_types import DateTimeType

from engine.config import DataConfig, RetrainConfig
from engine.data.contract import RL_PROMPTS, check
from engine.data.incremental_data import NewFiles, NewRows, find_new_files, find_new_rows
from engine.data.prepare import check_contract
from engine.data.sources import load_splits
from engine.errors import ConfigError, DataError
from engine.stages.dataset import (
    SPLITS,
    check_kickoff,
    skip_reason,
    with_new_rows,
    write_split,
)
from engine.stages.settings import IngestSettings, NewData
from engine.tracking.model_versions import ModelVersion

# Ingest: which arrived rows are new, and that rows which keep the contract can be stored.

KICKOFF = datetime(2100, 1, 1, tzinfo=UTC)
CONFIG = RetrainConfig(minimum_rows=8, replay=0.5)
Row = dict[str, Any]


def row(question: str, truth: Any = "7", **columns: Any) -> Row:
    """A row as a writer might send it; a column that is None is not there."""
    made = {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0},
        **columns,
    }
    return {name: value for name, value in made.items() if value is not None}


@pytest.fixture
def former(tmp_path: Path) -> Path:
    """The champion's dataset."""
    sizes = {"sft_size": 16, "train_size": 16, "validation_size": 4, "test_size": 12}
    splits = load_splits(DataConfig.model_validate(sizes), 0)
    folder = tmp_path / "former"
    folder.mkdir()
    for name, frame in splits.frames().items():
        write_split(frame, folder / f"{name}.parquet")
    return folder


def asked(former: Path, split: str) -> list[tuple[str, str]]:
    """Question and ground truth of each row of a split."""
    frame = pd.read_parquet(former / f"{split}.parquet")
    pairs = zip(frame["prompt"], frame["reward_model"], strict=True)
    return [(prompt[0]["content"], rule["ground_truth"]) for prompt, rule in pairs]


def arrive(folder: Path, *files: list[Row]) -> NewFiles:
    """Write a file for each list of rows; return what is new."""
    day = folder / "arrivals" / "2099-12-31"
    day.mkdir(parents=True)
    for number, rows in enumerate(files):
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (day / f"{number}.jsonl").write_text(text)
    return find_new_files(str(day.parent), KICKOFF, [], 30)


def ingest(
    former: Path,
    new_files: NewFiles,
    config: RetrainConfig = CONFIG,
    data: DataConfig = DataConfig(),  # noqa: B008 (frozen)
) -> pd.DataFrame:
    """Mix, check and store the next dataset, as the task does; return `train` as it is read."""
    new_data = NewData(
        prefix=new_files.prefix, files=list(new_files.files), dataset=str(former), dataset_digest=""
    )
    settings = IngestSettings(new_data=new_data, data=data, retrain=config, seed=0)
    splits = with_new_rows(former, settings)
    check_contract(splits)
    folder = former.with_name(f"{former.name}-next")
    folder.mkdir()
    for name in SPLITS:
        write_split(getattr(splits, name), folder / f"{name}.parquet")
    return pd.read_parquet(folder / "train.parquet")


QUESTIONS = [f"What is new {n} plus 7?" for n in range(10)]
KINDS: dict[str, Callable[[str, int], Row]] = {
    "no extra_info": lambda question, n: row(question, extra_info=None),
    "an empty extra_info": lambda question, n: row(question, extra_info={}),
    "extra_info in some": lambda question, n: row(question, extra_info={} if n % 2 else None),
    "a number as ground truth": lambda question, n: row(question, 7),
    "a float as ground truth": lambda question, n: row(question, 7.0),
    "both": lambda question, n: row(question, "7" if n % 2 else 7),
    "a text as index": lambda question, n: row(question, extra_info={"index": f"a{n}"}),
    "mixed": lambda question, n: row(question, extra_info={"index": n if n % 2 else [n, "b"]}),
    "deep": lambda question, n: row(question, extra_info={"more": {"a": n if n % 2 else "b"}}),
    "empty inside": lambda question, n: row(question, extra_info={"more": {}}),
    "a huge number": lambda question, n: row(question, extra_info={"index": 1 << 70}),
    "more in the rule": lambda question, n: row(
        question, reward_model={"style": n, "ground_truth": "7"}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replay", [0.0, 0.5])
def test_rows_that_keep_the_contract_are_ingested_beside_any_others(
    former: Path, tmp_path: Path, kind: str, replay: float
) -> None:
    rows = [KINDS[kind](question, n) for n, question in enumerate(QUESTIONS)]
    check(pd.DataFrame([one | {"extra_info": one.get("extra_info", {})} for one in rows]),
          RL_PROMPTS, "alone")  # fmt: skip
    train = ingest(former, arrive(tmp_path, rows), RetrainConfig(replay=replay))
    assert len(train) == (20 if replay else 10)
    check(train, RL_PROMPTS, "train")
    mine = train[: len(QUESTIONS)]
    assert [prompt[0]["content"] for prompt in mine["prompt"]] == QUESTIONS
    assert {rule["ground_truth"] for rule in mine["reward_model"]} == {"7"}


def test_a_run_reads_the_dataset_of_the_run_before(former: Path, tmp_path: Path) -> None:
    ingest(former, arrive(tmp_path / "one", [row(q, extra_info=None) for q in QUESTIONS]),
         RetrainConfig(replay=0.0))  # fmt: skip
    again = [row(f"And {q}", extra_info={"index": f"b{n}"}) for n, q in enumerate(QUESTIONS)]
    following = former.with_name("former-next")
    train = ingest(following, arrive(tmp_path / "two", again))
    assert len(train) == 20
    assert train["extra_info"][3] == {"index": "b3"}


def test_mixed_fields_become_text_and_others_stay(former: Path, tmp_path: Path) -> None:
    rows = [row(q, extra_info={"index": f"a{n}", "weight": n / 2}) for n, q in enumerate(QUESTIONS)]
    train = ingest(former, arrive(tmp_path, rows))
    assert train["extra_info"][4]["index"] == "a4"
    assert train["extra_info"][4]["weight"] == 2.0
    assert train["extra_info"][12]["index"].isdecimal()


def test_what_parquet_can_not_hold_is_a_sentence(tmp_path: Path) -> None:
    frame = pd.DataFrame([row("one"), row("two", extra_info={"index": "b"})])
    with pytest.raises(
        DataError, match=r"^train can't be written as Parquet .* of one type in all"
    ):
        write_split(frame, tmp_path / "train.parquet")


def test_rows_that_break_the_contract_are_named(former: Path, tmp_path: Path) -> None:
    rows = [row(q, extra_info=1 if n == 3 else {"a": 1}) for n, q in enumerate(QUESTIONS)]
    with pytest.raises(DataError, match=r"/0\.jsonl, row 4: column 'extra_info' is 1; give a dict"):
        ingest(former, arrive(tmp_path, rows))


def champion() -> ModelVersion:
    return ModelVersion("policy", "3", "run", "models/3", {}, ())


def reason(former: Path, new_files: NewFiles) -> str:
    new_rows = find_new_rows(former, new_files, DataConfig())
    return skip_reason(new_files, new_rows, CONFIG, champion())


def test_what_is_held_out_or_trained_on_already_is_not_new(former: Path, tmp_path: Path) -> None:
    known = [row(question.upper(), truth) for question, truth in asked(former, "train")]
    held_out = [row(question) for question, _ in asked(former, "test")]
    new_files = arrive(tmp_path, held_out, known)
    found = find_new_rows(former, new_files, DataConfig())
    assert (len(found.rows), found.dropped) == (0, 28)
    said = reason(former, new_files)
    assert said.startswith("0 new problems since version 3 became champion (28 more are repeated,")
    assert said.endswith("fewer than retrain.minimum_rows=8")
    with pytest.raises(DataError, match=r"none of the 28 new problems of .* is left to train on"):
        ingest(former, new_files)


def test_the_count_is_what_the_dataset_keeps(former: Path, tmp_path: Path) -> None:
    held_out = [row(question) for question, _ in asked(former, "validation")]
    question, truth = asked(former, "train")[0]
    corrected = row(question, f"{truth}0")
    new = [row(q) for q in QUESTIONS[:6]]
    new_files = arrive(tmp_path / "few", new + held_out, [*new, corrected])
    assert "7 new problems since version 3 became champion (10 more" in reason(former, new_files)
    new_files = arrive(tmp_path / "enough", [*new, row(QUESTIONS[6]), corrected])
    assert reason(former, new_files) == ""
    train = ingest(former, new_files, RetrainConfig(replay=0.4))
    assert len(train) == 8 + 5
    truths = [rule["ground_truth"] for prompt, rule in zip(train["prompt"], train["reward_model"],
              strict=True) if prompt[0]["content"] == question]  # fmt: skip
    assert truths == [f"{truth}0"], "the answer that it replaces is gone"


def test_a_row_without_a_prompt_is_named(former: Path, tmp_path: Path) -> None:
    for number, rows in enumerate(([{"text": "?"}], [row("one"), row("two", prompt=None)])):
        message = rf"2099-12-31/0\.jsonl, row {number + 1}: column 'prompt' is None; give"
        with pytest.raises(DataError, match=message):
            find_new_rows(former, arrive(tmp_path / str(number), rows), DataConfig())


def test_arrived_prompts_get_the_system_message_that_the_old_ones_have(tmp_path: Path) -> None:
    data = DataConfig(sft_size=16, train_size=16, validation_size=4, test_size=12,
                      system_prompt="Be brief.")  # fmt: skip
    (folder := tmp_path / "former").mkdir()
    for name, frame in load_splits(data, 0).frames().items():
        write_split(frame, folder / f"{name}.parquet")
    test = pd.read_parquet(folder / "test.parquet")["prompt"]
    held_out = [row(prompt[1]["content"]) for prompt in test]
    new_files = arrive(tmp_path, [*map(row, QUESTIONS), *held_out])
    assert find_new_rows(folder, new_files, data).dropped == len(held_out)
    assert {prompt[0]["content"] for prompt in ingest(folder, new_files, data=data)["prompt"]} == {
        "Be brief."
    }


def test_bad_rows_that_arrive_are_left_out_where_the_settings_say_so(
    former: Path, tmp_path: Path
) -> None:
    new_files = arrive(tmp_path, [*map(row, QUESTIONS), {"prompt": "4?"}])
    with pytest.raises(DataError, match=r"row 11: there is no ground truth.*data\.bad_rows=drop"):
        find_new_rows(former, new_files, DataConfig())
    new = find_new_rows(former, new_files, DataConfig(bad_rows="drop"))
    assert len(new.rows) == new.total == 10
    assert "1 of 11 rows are bad and left out (row 11)" in new.notes[0]


def test_rows_of_other_forms_are_ingested_as_on_the_command_line(
    former: Path, tmp_path: Path
) -> None:
    rows = [row(q) for q in QUESTIONS]
    rows[1] = {"prompt": QUESTIONS[1], "ground_truth": 7}
    train = ingest(former, arrive(tmp_path / "one", rows), RetrainConfig(replay=0.0))
    assert [rule["ground_truth"] for rule in train["reward_model"]] == ["7"] * 10
    assert list(train["prompt"][1]) == [{"role": "user", "content": QUESTIONS[1]}]
    rows[1]["reward_model"] = {"ground_truth": "8"}
    with pytest.raises(DataError, match=r"/0\.jsonl, row 2: column 'ground_truth' is 7, but rew"):
        ingest(former, arrive(tmp_path / "two", rows))
    rows[1] = {"prompt": QUESTIONS[1], "ground_truth": float("nan")}
    with pytest.raises(DataError, match=r"/0\.jsonl, row 2: there is no ground truth"):
        ingest(former, arrive(tmp_path / "three", rows))


# The moment of a kick-off: in UTC, and not still to come.

NOW = datetime(2026, 11, 20, 2, tzinfo=UTC)


def test_a_kick_off_that_has_passed_or_is_as_good_as_now_starts() -> None:
    for early in (timedelta(days=-9), timedelta(0), timedelta(minutes=9)):
        check_kickoff(NOW + early, NOW)
        check_kickoff((NOW + early).replace(tzinfo=None), NOW)


def test_one_that_is_still_to_come_is_refused_in_utc() -> None:
    tokyo = timezone(timedelta(hours=9))
    for at in (NOW + timedelta(minutes=11), (NOW + timedelta(minutes=11)).replace(tzinfo=None),
               (NOW + timedelta(minutes=11)).astimezone(tokyo)):  # fmt: skip
        with pytest.raises(ConfigError, match="2026-11-20T02:11:00 is still to come: it is now"):
            check_kickoff(at, NOW)


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_pyflyte_s_now_east_of_utc_is_refused(tokyo: None) -> None:
    context = FlyteContextManager.current_context()
    typed = DateTimeType().convert("now", None, None)
    literal = TypeEngine.to_literal(context, typed, datetime, TypeEngine.to_literal_type(datetime))
    given = TypeEngine.to_python_value(context, literal, datetime)
    with pytest.raises(ConfigError, match=r'such as --kickoff "\$\(date -u'):
        check_kickoff(given, datetime.now(UTC))


@pytest.mark.parametrize(
    ("waiting", "end"),
    [
        (0, "became champion"),
        (1, "became champion; 1 file written after the kick-off waits for a later one"),
        (3, "became champion; 3 files written after the kick-off wait for a later one"),
    ],
)
def test_files_after_the_kick_off_are_in_the_reason(waiting: int, end: str) -> None:
    champion = ModelVersion("policy", "2", "ab", "s3://mlflow", {}, ("champion",))
    files = NewFiles("/arrivals", waiting=waiting)
    reason = skip_reason(files, NewRows(pd.DataFrame(), 0), RetrainConfig(), champion)
    assert reason == f"nothing new in /arrivals since version 2 {end}"
