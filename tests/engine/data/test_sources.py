from pathlib import Path

import pandas as pd
import pytest
from once import OwnEntries
from pydantic import JsonValue

from engine.config import DataConfig
from engine.data import sources
from engine.data.sources import Splits, load_splits, register_source, source_digest
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
