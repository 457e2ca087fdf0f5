"""Tables of artifacts as typed data frames: their columns, where they lie, broken contracts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest
from flytekit import FlyteContextManager, StructuredDataset, task, workflow
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine

from engine.data import contract, rows
from engine.errors import DataError, StorageError
from tasks.host import RLPrompts, SFTPairs, TableFile, as_table, open_table

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"<b>{n}</b> + 1 = ?"}],
        "response": str(n + 1) * (300 if n == 0 else 1),
        "extra_info": {"index": n},
    }
    for n in range(40)
]


@pytest.fixture
def pairs(tmp_path: Path) -> TableFile:
    path = tmp_path / "sft_train.parquet"
    pd.DataFrame(ROWS).to_parquet(path, index=False)
    return TableFile(path)


@pytest.mark.parametrize("name", ["RL_PROMPTS", "SFT_PAIRS", "EVALUATION_ROWS"])
def test_the_columns_are_those_of_the_contract(name: str) -> None:
    schema = getattr(contract, name)
    required = [column for column, spec in schema.columns.items() if spec.required]
    assert list(getattr(rows, name)) == required


def test_flyte_knows_the_columns_and_their_types() -> None:
    columns = TypeEngine.to_literal_type(RLPrompts).structured_dataset_type.columns
    assert [one.name for one in columns] == list(rows.RL_PROMPTS)
    assert columns[0].literal_type.simple == TypeEngine.to_literal_type(str).simple
    assert columns[1].literal_type == TypeEngine.to_literal_type(list[dict[str, str]])


def test_a_table_passes_between_tasks_where_it_lies(pairs: TableFile) -> None:
    seen: list[Path] = []

    @task
    def make(path: str) -> SFTPairs:
        return as_table(TableFile(Path(path)))

    @task
    def use(table: SFTPairs) -> int:
        file = open_table(table)
        seen.append(file.path)
        frame = file.read(contract.SFT_PAIRS, "sft_train")
        assert list(frame.columns) == ["prompt", "response", "extra_info"], "all, not the typed"
        return len(frame)

    @workflow
    def both(path: str) -> int:
        return use(table=make(path=path))

    assert both(path=str(pairs.path)) == 40
    assert seen == [pairs.path], "nothing was copied"


@pytest.mark.parametrize("uri", ["", "s3://store/artifacts/dataset/1/sft_train.parquet"])
def test_a_pod_uploads_only_what_is_not_in_the_store(
    pairs: TableFile, tmp_path: Path, uri: str
) -> None:
    context = FlyteContextManager.current_context()
    access = context.file_access.__class__(str(tmp_path / "pod"), str(tmp_path / "raw"))
    mode = ExecutionState.Mode.TASK_EXECUTION
    state = context.new_execution_state().with_params(mode=mode)
    pod = context.with_file_access(access).with_execution_state(state).build()
    with FlyteContextManager.with_context(pod.new_builder()) as inside:
        table = as_table(TableFile(pairs.path, uri))
        kind = TypeEngine.to_literal_type(SFTPairs)
        literal = TypeEngine.to_literal(inside, table, SFTPairs, kind)
    found = literal.scalar.structured_dataset
    assert [one.name for one in found.metadata.structured_dataset_type.columns] == [
        "prompt",
        "response",
    ]
    if uri:
        assert found.uri == uri
        assert not (tmp_path / "raw").exists()
    else:
        assert found.uri.startswith(str(tmp_path / "raw"))
        assert Path(found.uri).read_bytes() == pairs.path.read_bytes()


def test_what_breaks_the_contract_ends_in_one_sentence(pairs: TableFile, tmp_path: Path) -> None:
    frame = pd.read_parquet(pairs.path)
    frame.loc[7, "response"] = " "
    broken = TableFile(tmp_path / "broken.parquet")
    frame.to_parquet(broken.path, index=False)
    with pytest.raises(DataError, match=r"^train: column 'response' must not be empty.*row 7 has"):
        broken.read(contract.SFT_PAIRS, "train")
    broken.path.write_bytes(b"no table")
    with pytest.raises(StorageError, match=r"train: the table .* can't be read .*overwrite-cache"):
        broken.read(contract.SFT_PAIRS, "train")


def test_a_deck_shows_the_first_rows_as_text(pairs: TableFile) -> None:
    context = FlyteContextManager.current_context()
    kind = get_args(SFTPairs)[0]
    assert kind is StructuredDataset
    page = TypeEngine.to_html(context, as_table(pairs), SFTPairs)
    assert page.count("<tr") == 1 + 10
    assert "sft_train.parquet" in page
    assert "&lt;b&gt;3&lt;/b&gt; + 1" in page
    assert "<b>" not in page
    assert "1" * 200 + "…" in page


def test_a_frame_of_no_artifact_is_written_for_the_next_task() -> None:
    written = TableFile.write(pd.DataFrame(ROWS))
    frame = written.read(contract.SFT_PAIRS, "part 1")
    assert list(frame["response"]) == [row["response"] for row in ROWS]
