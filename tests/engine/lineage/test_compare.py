"""What differs between two artifacts is named: settings, data down to rows, code, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from lineage_store import make, make_run, parent

from engine.lineage.compare import ABSENT, ArtifactComparison, compare, lines, row_change
from engine.lineage.lookup import review
from engine.storage.artifacts import Draft, Parent, publish, staging
from engine.tracking.connection import flatten


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


def diff(before: Path, after: Path) -> ArtifactComparison:
    found = review([str(before), str(after)], registry=False, descendants=False)
    return compare(found.graph, found.starts[0], found.starts[-1])


def dataset(rows: list[dict[str, Any]], **more: Any) -> Path:
    with staging("dataset") as folder:
        pd.DataFrame(rows).to_parquet(folder / "train.parquet", index=False)
        (folder / "same.txt").write_text("same")
        return publish(folder, Draft(kind="dataset", config=more))


def model(data: Path, text: str, lr: float, version: str, reward: float) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDFLYTE_CODE_VERSION", version)
        config = {"rl": {"lr": lr, "steps": 3, "empty": {}}, "text": "x"}
        return make("rl", text, parent("dataset", data), config=config, reward=reward, kl=0.5)


def test_settings_data_code_and_metrics_of_two_models() -> None:
    rows = [{"prompt": [{"role": "user", "content": str(n)}], "n": n} for n in range(10)]
    one, two = dataset(rows), dataset([*rows[1:], {"prompt": [], "n": 99}, {"prompt": [], "n": 99}])
    before, after = model(one, "a", 0.1, "v1", 0.5), model(two, "b", 0.2, "v2", 0.75)
    found = diff(before, after)
    assert [(c.name, c.before, c.after) for c in found.config] == [("rl.lr", "0.1", "0.2")]
    assert ("code version", "v1", "v2") in [(c.name, c.before, c.after) for c in found.code]
    metrics = {m.name: (m.before, m.after, m.delta) for m in found.metrics}
    assert metrics == {"reward": (0.5, 0.75, 0.25), "kl": (0.5, 0.5, 0.0)}
    (data,) = found.data
    assert [c.name for c in data.files] == ["train.parquet"]
    (table,) = data.rows
    assert (table.before, table.after, table.added, table.removed) == (10, 11, 2, 1)
    assert [c.name for c in found.parents] == ["dataset"]
    assert [c.name for c in found.files] == ["content.txt"]
    assert not found.same_content


def test_an_artifact_does_not_differ_from_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = diff(run.rl, run.rl)
    assert found.same_content
    assert (found.config, found.data, found.code, found.parents, found.files) == ((),) * 5
    assert "both hold the same bytes" in list(lines(found))


def test_settings_that_only_one_side_has_and_metrics_that_are_no_numbers() -> None:
    one = make("sft", "a", config={"a": 1, "b": None}, loss=float("inf"))
    two = make("sft", "b", config={"b": "x", "c": {"d": []}}, other=1.0)
    found = diff(one, two)
    assert {c.name: (c.before, c.after) for c in found.config} == {
        "a": ("1", ABSENT),
        "b": ("null", "x"),
        "c.d": (ABSENT, "[]"),
    }
    assert {m.name: m.delta for m in found.metrics} == {"loss": None, "other": None}


def test_data_that_only_one_side_has() -> None:
    source = Parent(name="raw", kind="source", digest="ab" * 32, uri="s3://a/b")
    with_data = make("rl", "one", parent("dataset", make("dataset", "rows", source)))
    found = diff(make("rl", "two"), with_data)
    assert [(c.kind, c.before) for c in found.data] == [("dataset", None), ("source", None)]
    text = "\n".join(lines(found))
    assert "source: — → s3://a/b (abababababab)" in text


def test_rows_of_json_lines_and_columns(tmp_path: Path) -> None:
    for name, text in (("one", '{"a": 1}\n{"a": 2}\n'), ("two", '{"a": 2, "b": 1}\n\n{"a": 1}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text(text)
        (tmp_path / name / "x.bin").write_text(text)
    found = row_change("x.jsonl", str(tmp_path / "one"), str(tmp_path / "two"))
    assert found is not None
    assert (found.added, found.removed, found.columns) == (1, 1, "+b")
    assert row_change("x.bin", str(tmp_path / "one"), str(tmp_path / "two")) is None
    (tmp_path / "two" / "x.jsonl").write_text("no JSON")
    assert row_change("x.jsonl", str(tmp_path / "one"), str(tmp_path / "two")) is None


def test_flatten_names_nested_settings() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}
