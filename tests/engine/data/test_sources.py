from pathlib import Path

import pandas as pd
import pytest
from pydantic import JsonValue

from engine.config import DataConfig
from engine.data import sources
from engine.data.sources import Splits, load_splits, register_source, source_digest
from engine.errors import ConfigError

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sources._registry, "_entries", dict(sources._registry._entries))
    mine = config("source_of_test:Mine", rows=3)
    splits = load_splits(mine, 0)
    assert len(splits.train) == 3
    assert splits.source_digest == source_digest(mine, 0)
    (tmp_path / "source_of_test.py").write_text(MODULE + "# another version of the code\n")
    assert splits.source_digest != source_digest(mine, 0)
    message = "data.options.row: data source 'rows_of_mine' doesn't read 'row'"
    with pytest.raises(ConfigError, match=message):
        load_splits(config("rows_of_mine", row=3), 0)


def test_a_registered_source_is_loaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources._registry, "_entries", {})
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


@pytest.mark.parametrize("source", ["arithmetic", "gsm8k"])
def test_settings_of_files_alone_are_refused_with_other_sources(source: str) -> None:
    mapped = DataConfig(source=source, columns={"prompt": "q"})
    with pytest.raises(ConfigError, match=rf"data\.columns has no effect with .*={source}; remove"):
        source_digest(mapped, 0)
    with pytest.raises(
        ConfigError, match=r"data\.train_size=0 \(all rows\) needs data\.source=files"
    ):
        source_digest(DataConfig(source=source, train_size=0), 0)
