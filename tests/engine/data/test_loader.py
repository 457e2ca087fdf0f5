import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.data.loader import PromptLoader, add_prompt_ids, make_rl_data_loader
from engine.data.templates import encode_prompt
from engine.errors import ConfigError, DataError


def frame(size: int) -> pd.DataFrame:
    return pd.DataFrame({"prompt": [f"p{i}" for i in range(size)], "row": range(size)})


def take(loader: PromptLoader, batches: int) -> list[int]:
    return [row["row"] for _ in range(batches) for row in loader.next_batch()]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(size=st.integers(1, 30), batch=st.integers(1, 40), seed=st.integers(0, 9))
def test_every_row_comes_once_an_epoch_in_full_batches(size: int, batch: int, seed: int) -> None:
    loader = PromptLoader(frame(size), batch, seed)
    batches = [loader.next_batch() for _ in range(3 * size)]
    assert {len(b) for b in batches} == {min(batch, size)}
    rows = [row["row"] for b in batches for row in b]
    for start in range(0, len(rows) - size + 1, size):
        assert sorted(rows[start : start + size]) == list(range(size))


@given(
    size=st.integers(1, 30),
    batch=st.integers(1, 9),
    seen=st.integers(0, 20),
    shuffle=st.booleans(),
)
def test_a_resumed_loader_goes_on_exactly(size: int, batch: int, seen: int, shuffle: bool) -> None:
    whole = PromptLoader(frame(size), batch, 1, shuffle)
    take(whole, seen)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptLoader(frame(size), batch, 1, shuffle)
    resumed.load_state_dict(state)
    assert take(resumed, 12) == take(whole, 12)
    assert resumed.state_dict() == whole.state_dict()


def test_epochs_and_seeds_differ_and_shuffling_can_be_off() -> None:
    loader = PromptLoader(frame(50), 50, 0)
    first, second = take(loader, 1), take(loader, 1)
    assert first != second
    assert loader.epoch == 2
    assert take(PromptLoader(frame(50), 50, 1), 1) != first
    assert take(PromptLoader(frame(50), 20, 0, shuffle=False), 3) == [*range(50), *range(10)]


def test_changing_a_given_row_leaves_the_data_alone() -> None:
    loader = PromptLoader(frame(1), 1, 0)
    loader.next_batch()[0]["row"] = 99
    assert loader.next_batch()[0]["row"] == 0


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptLoader(frame(9), 2, 0), "rows"),
        (PromptLoader(frame(8), 2, 5), "seed"),
        (PromptLoader(frame(8), 2, 0, shuffle=False), "shuffle"),
        (PromptLoader(frame(8).iloc[::-1], 2, 0), "digest"),
    ],
)
def test_a_state_of_other_data_is_refused(other: PromptLoader, named: str) -> None:
    loader = PromptLoader(frame(8), 2, 0)
    with pytest.raises(DataError, match=f"{named} is"):
        loader.load_state_dict(other.state_dict())


def test_a_damaged_state_is_refused() -> None:
    loader = PromptLoader(frame(8), 2, 0)
    with pytest.raises(DataError, match="position 8 of 8"):
        loader.load_state_dict({**loader.state_dict(), "position": 8})


def test_no_rows_and_no_batch_size_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        PromptLoader(frame(0), 2, 0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        PromptLoader(frame(2), 0, 0)


def test_a_users_file_becomes_rows_of_the_contract(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+3?"}]
    rows: list[dict[str, object]] = [
        {"prompt": "1+1?", "ground_truth": "2", "level": "easy"},
        {"prompt": messages, "reward_model": {"ground_truth": "5"}, "level": "hard"},
    ]
    loader = make_rl_data_loader(write(tmp_path / "d.jsonl", rows), batch_size=2, shuffle=False)
    first, second = loader.next_batch()
    assert first["prompt"] == [{"role": "user", "content": "1+1?"}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert second["prompt"] == messages
    assert second["reward_model"]["ground_truth"] == "5"
    assert (first["level"], second["level"]) == ("easy", "hard")
    assert {"data_source", "ability", "extra_info"} <= first.keys()


def test_parquet_and_rows_without_ground_truth_are_read(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pd.DataFrame({"prompt": [[{"role": "user", "content": "Hi"}]] * 3}).to_parquet(path)
    (row,) = make_rl_data_loader(path, batch_size=1).next_batch()
    assert row["prompt"] == [{"role": "user", "content": "Hi"}]
    assert row["reward_model"]["ground_truth"] is None


def test_a_tokenizer_adds_tokens_and_a_limit(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "1"}, {"prompt": "1 2 3 4 5 6 7 8"}])
    loader = make_rl_data_loader(path, tokenizer, batch_size=2, shuffle=False)
    row = loader.next_batch()[1]
    assert row["prompt_ids"] == encode_prompt(tokenizer, row["prompt"])
    with pytest.raises(DataError, match=r"1 prompts are longer than 6 tokens \(row 2\)"):
        make_rl_data_loader(path, tokenizer, max_prompt_length=6)


def test_rows_keep_the_numbers_of_their_file(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("1", "1 2 3 4 5 6 7 8")]
    with pytest.raises(DataError, match=r"^d\.jsonl: 1 prompts are longer .* \(row 7\); shorten"):
        add_prompt_ids(rows, tokenizer, 6, "d.jsonl", numbers=[4, 7])


def test_numbers_stay_whole_where_a_row_has_none(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "a", "level": 1}, {"prompt": "b"}]
    path = write(tmp_path / "d.jsonl", rows)
    batch = make_rl_data_loader(path, batch_size=2, shuffle=False).next_batch()
    assert [repr(row["level"]) for row in batch] == ["1", "None"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "  "}, "row 2: column 'prompt'"),
        ({"question": "x"}, "row 2: there is no column 'prompt'; name one of"),
        ({"prompt": [{"role": "user"}]}, "row 2: column 'prompt'"),
        ({"prompt": []}, "row 2: column 'prompt'"),
        ({"prompt": "x", "reward_model": "5"}, "row 2: column 'reward_model' is '5'"),
        ({"prompt": "x"}, r"1 of 2 rows have no ground truth \(row 2\)"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "ok", "ground_truth": "1"}, row])
    with pytest.raises(DataError, match=message):
        make_rl_data_loader(path)
