"""Sources of rows, evaluation sets among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from once import OwnEntries
from pydantic import JsonValue, ValidationError

from engine.config import DataConfig, PipelineConfig, explain
from engine.data import sources
from engine.data.decontamination import without_held_out
from engine.data.sources import (
    Splits,
    evaluation_files,
    load_splits,
    read_evaluation_sets,
    register_source,
    source_digest,
)
from engine.errors import ConfigError, DataError

MODULE = """
from engine.data.sources import Splits, register_source
import pandas as pd

@register_source("rows_of_mine")
class Mine:
    def __init__(self, *, rows: int = 1):
        self.rows = rows

    def digest(self, config, seed):
        return f"digest of {self.rows} rows"

    def load(self, config, seed):
        table = pd.DataFrame({"row": range(self.rows)})
        return Splits(*[table] * 5, source_digest=self.digest(config, seed), source_uri="x")
"""


def config(name: str, **options: JsonValue) -> DataConfig:
    return DataConfig(source=name, options=options)


def test_a_source_from_outside_is_one_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_entries: OwnEntries
) -> None:
    (tmp_path / "source_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    own_entries(sources._registry)
    mine = config("source_of_test:Mine", rows=3)
    splits = load_splits(mine, 0)
    assert len(splits.train) == 3
    assert splits.source_digest == source_digest(mine, 0)
    (tmp_path / "source_of_test.py").write_text(MODULE + "# another version of the code\n")
    assert splits.source_digest != source_digest(mine, 0)
    message = "data.options.row: data source 'rows_of_mine' doesn't read 'row'"
    with pytest.raises(ConfigError, match=message):
        load_splits(config("rows_of_mine", row=3), 0)


def test_a_registered_source_is_loaded_by_its_name(own_entries: OwnEntries) -> None:
    own_entries(sources._registry)
    tables = [pd.DataFrame({"row": [i]}) for i in range(5)]

    @register_source("mine")
    class Mine:
        def digest(self, config: DataConfig, seed: int) -> str:
            return f"digest {seed}"

        def load(self, config: DataConfig, seed: int) -> Splits:
            return Splits(*tables, source_digest=self.digest(config, seed), source_uri="x")

    splits = load_splits(config("mine"), 4)
    assert splits.source_digest == source_digest(config("mine"), 4)
    assert splits.source_digest != source_digest(config("mine"), 5)
    names = ["sft_train", "sft_validation", "train", "validation", "test"]
    assert list(splits.frames()) == names
    assert all(splits.frames()[name] is table for name, table in zip(names, tables, strict=True))


@pytest.mark.parametrize("name", ["arithmetics", "loader"])
def test_an_unknown_source_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"'{name}' is unknown.*choose one of arithmetic, files, gsm8k"
    ):
        load_splits(config(name), 0)


def test_settings_of_files_alone_are_refused_with_the_default_source() -> None:
    source = "arithmetic"
    mapped = DataConfig(source=source, columns={"prompt": "q"})
    with pytest.raises(ConfigError, match=rf"data\.columns has no effect with .*={source}; remove"):
        source_digest(mapped, 0)
    with pytest.raises(
        ConfigError, match=r"data\.train_size=0 \(all rows\) needs data\.source=files"
    ):
        source_digest(DataConfig(source=source, train_size=0), 0)
    other = DataConfig(source=source, templates={"ground_truth": "7"})
    with pytest.raises(ConfigError, match=r"data\.templates\.ground_truth has no effect with"):
        source_digest(other, 0)


def test_questions_are_put_as_the_prompts_template_and_system_message_say() -> None:
    sizes = {"sft_size": 2, "train_size": 2, "validation_size": 2, "test_size": 2}
    plain = load_splits(DataConfig(**sizes), 0)
    template = {"prompt": "{{ question }} Answer with a number."}
    worded = load_splits(DataConfig(**sizes, templates=template, system_prompt="Be brief."), 0)
    for name, frame in worded.frames().items():
        before = plain.frames()[name]
        for prompt, messages in zip(before["prompt"], frame["prompt"], strict=True):
            assert messages == [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"{prompt[0]['content']} Answer with a number."},
            ]
        assert frame.drop(columns="prompt").equals(before.drop(columns="prompt"))
    with pytest.raises(DataError, match=r"^sft_train, row 0: data\.templates\.prompt can't be"):
        load_splits(DataConfig(**sizes, templates={"prompt": "{{ query }}"}), 0)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_read(*sets: dict[str, Any], **changes: Any) -> DataConfig:
    return DataConfig.model_validate({"evaluation_sets": list(sets)} | changes)


@pytest.fixture
def hard(tmp_path: Path) -> Path:
    rows = [{"problem": f"What is {n} times 7?", "answer": 7 * n, "level": n} for n in range(6)]
    return write(tmp_path / "hard.jsonl", rows)


def test_a_set_has_columns_of_its_own_and_rows_by_seed(hard: Path) -> None:
    mapped = {"columns": {"prompt": "problem", "ground_truth": "answer"}, "path": str(hard)}
    some = {"name": "some", "size": 4, "data_source": "times"} | mapped
    frames, notes = read_evaluation_sets(config_read({"name": "hard"} | mapped, some), seed=0)
    row = frames["hard"].iloc[2]
    assert row["prompt"][0]["content"] == "What is 2 times 7?"
    assert (row["reward_model"]["ground_truth"], row["data_source"]) == ("14", "hard")
    assert row["extra_info"] == {"level": 2, "index": 2, "split": "test_hard"}
    assert [len(frame) for frame in frames.values()] == [6, 4]
    assert set(frames["some"]["data_source"]) == {"times"}
    assert notes == ("test_some: 4 of 6 rows, by seed",)
    places = [extra["index"] for extra in frames["some"]["extra_info"]]
    assert places == sorted(places)
    drawn = {
        tuple(
            x["index"]
            for x in read_evaluation_sets(config_read(some), seed)[0]["some"]["extra_info"]
        )
        for seed in range(8)
    }
    assert len(drawn) > 1


def test_the_test_split_of_a_folder_is_taken_with_or_without_a_training_split(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": "1+1=", "ground_truth": "2"}]
    write(tmp_path / "set" / "test.jsonl", rows)
    given = {"name": "sums", "path": str(tmp_path / "set")}
    assert len(read_evaluation_sets(config_read(given), 0)[0]["sums"]) == 1
    write(tmp_path / "set" / "train.jsonl", rows * 5)
    assert len(read_evaluation_sets(config_read(given), 0)[0]["sums"]) == 1


def test_bad_rows_are_refused_or_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "ground_truth": "2"}, {"prompt": "", "ground_truth": "3"}]
    given = {"name": "sums", "path": str(write(tmp_path / "sums.jsonl", rows))}
    with pytest.raises(DataError, match=r"sums\.jsonl, row 2"):
        read_evaluation_sets(config_read(given), 0)
    frames, notes = read_evaluation_sets(config_read(given, bad_rows="drop"), 0)
    assert len(frames["sums"]) == 1
    assert "1 of 2 rows are bad and left out" in notes[0]


def test_the_digest_is_of_the_sets_too_and_the_splits_have_them(hard: Path) -> None:
    columns = {"prompt": "problem", "ground_truth": "answer"}
    given = config_read({"name": "hard", "path": str(hard), "columns": columns}, test_size=4)
    before = source_digest(given, 0)
    assert before != source_digest(DataConfig(test_size=4), 0)
    splits = load_splits(given, 0)
    assert splits.source_digest == before
    assert list(splits.tables())[-1] == "test_hard"
    write(hard, [{"problem": "What is 1 times 7?", "answer": 7}])
    assert source_digest(given, 0) != before


def test_what_models_are_judged_on_is_held_out_of_training(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} plus {n}?", "ground_truth": 2 * n} for n in range(40)]
    train, judged = write(tmp_path / "train.jsonl", rows), write(tmp_path / "set.jsonl", rows[:3])
    given = config_read(
        {"name": "sums", "path": str(judged)},
        source="files", path=str(train), validation_size=4, test_size=4,
    )  # fmt: skip
    splits = without_held_out(load_splits(given, 0), given)
    texts = {prompt[0]["content"] for prompt in splits.train["prompt"]}
    texts |= {prompt[0]["content"] for prompt in splits.validation["prompt"]}
    assert texts
    assert not texts & {row["prompt"] for row in rows[:3]}
    for name, frame in splits.tables().items():
        frame.to_parquet(tmp_path / f"{name}.parquet")
    assert list(evaluation_files(tmp_path)) == ["test", "sums"]
    assert len(pd.read_parquet(evaluation_files(tmp_path)["sums"])) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": {"evaluation_sets": [{"name": "all", "path": "x"}]}}, "can't have the name all"),
        ({"data": {"evaluation_sets": [{"name": "a", "path": "x"}] * 2}}, "has the name a twice"),
        ({"data": {"evaluation_sets": [{"name": "A b", "path": "x"}]}}, "name"),
        ({"promote": {"dataset": "aime"}}, "names the evaluation set 'aime', and there are test"),
        ({"promote": {"guards": [{"dataset": "aime"}]}}, "pass_at_1 of aime"),
    ],
)
def test_names_that_lead_nowhere_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PipelineConfig.model_validate(values)
    assert message in explain(caught.value, PipelineConfig)


def test_a_warm_start_of_rows_with_tools_is_refused(tmp_path: Path) -> None:
    tool = {"name": "add", "parameters": {"type": "object"}}
    rows = [{"prompt": f"{i}+1?", "ground_truth": str(i + 1), "tools": [tool]} for i in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = DataConfig(source="files", path=str(tmp_path), validation_size=1, test_size=1)
    with pytest.raises(DataError, match=r"^sft_train, row \d: column 'tools' is not shown in a"):
        load_splits(settings, 0)
