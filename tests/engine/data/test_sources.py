import pandas as pd
import pytest

from engine.config import DataConfig
from engine.data import sources
from engine.data.sources import Splits, load_splits, register_source, source_digest
from engine.errors import ConfigError


def config(name: str) -> DataConfig:
    return DataConfig.model_construct(**{**DataConfig().model_dump(), "source": name})


def test_a_registered_source_is_loaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_SOURCES", {})
    tables = [pd.DataFrame({"row": [i]}) for i in range(5)]

    @register_source("mine")
    class Mine:
        def digest(self, config: DataConfig, seed: int) -> str:
            return f"digest {seed}"

        def load(self, config: DataConfig, seed: int) -> Splits:
            return Splits(*tables, source_digest=self.digest(config, seed), source_uri="x")

    splits = load_splits(config("mine"), 4)
    assert splits.source_digest == source_digest(config("mine"), 4) == "digest 4"
    names = ["sft_train", "sft_validation", "train", "validation", "test"]
    assert list(splits.frames()) == names
    assert all(splits.frames()[name] is table for name, table in zip(names, tables, strict=True))


@pytest.mark.parametrize("name", ["arithmetics", "loader"])
def test_an_unknown_source_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' is unknown.*'arithmetic', 'gsm8k'"):
        load_splits(config(name), 0)
