"""Preference rows of files and of scored groups, and the examples and batches they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from engine.config import RowsConfig
from engine.data.contract import KTO_ROWS, PREFERENCE_PAIRS, check
from engine.data.preference_rows import (
    Kind,
    ScoredGroup,
    labels_from_groups,
    pairs_from_groups,
    preference_row,
    read_preference_rows,
)
from engine.data.row_files import RowMapper
from engine.data.templates import encode_conversation, encode_prompt, encode_response
from engine.data.tokenizer import train_tokenizer
from engine.data.training_examples import (
    LabelledExample,
    PairExample,
    collate_preferences,
    collate_scored,
    read_preferences,
    read_reward_pairs,
    with_others,
)
from engine.errors import DataError

USER = {"role": "user", "content": "1+1?"}
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def mapped(raw: dict[str, Any], kind: Kind = "pairs", **settings: Any) -> dict[str, Any]:
    mapper = RowMapper(RowsConfig.model_validate(settings))
    return preference_row(mapper, kind, raw, "d.jsonl, row 1")


PAIR = {"prompt": [USER], "chosen": "2", "rejected": "3", "margin": 0.0}


@pytest.mark.parametrize(
    "raw",
    [
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [assistant("2")], "rejected": [assistant("3")]},
        {"chosen": [USER, assistant("2")], "rejected": [USER, assistant("3")]},
        {"prompt": "1+1?", "chosen": [USER, assistant("2")], "rejected": [USER, assistant("3")]},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "margin": None, "score": 7},
    ],
)
def test_every_form_of_a_pair_is_the_same_row(raw: dict[str, Any]) -> None:
    assert mapped(raw) == PAIR


def test_columns_templates_and_a_system_message() -> None:
    found = mapped(
        {"question": "1+1", "pick": {"good": "2", "bad": "3"}, "gap": 2},
        columns={"chosen": "pick.good", "rejected": "pick.bad", "margin": "gap"},
        templates={"prompt": "{{ question }}?"},
        system_prompt="Count.",
    )
    system = {"role": "system", "content": "Count."}
    assert found == PAIR | {"prompt": [system, USER], "margin": 2.0}


def test_earlier_turns_belong_to_the_prompt() -> None:
    sides = {"chosen": assistant("2"), "rejected": assistant("3")}
    raw = {side: [*EARLIER, USER, one] for side, one in sides.items()}
    assert mapped(raw) == mapped(raw | {"prompt": "1+1?"}) == PAIR | {"prompt": [*EARLIER, USER]}


@pytest.mark.parametrize(
    ("label", "wanted"), [(True, True), (0, False), (1.0, True), ("False", False), ("1", True)]
)
def test_labels_of_all_files(label: Any, wanted: bool) -> None:
    row = mapped({"prompt": "1+1?", "completion": "2", "label": label}, "labels")
    assert row == {"prompt": [USER], "completion": "2", "label": wanted}


@pytest.mark.parametrize(
    ("raw", "kind", "said"),
    [
        ({"prompt": "a", "chosen": "2"}, "pairs", r"no column 'rejected'; name one of \['chosen'"),
        ({"chosen": "2", "rejected": "3"}, "pairs", "no column 'prompt', and no message before"),
        ({"prompt": "a", "chosen": "2", "rejected": "2"}, "pairs", "are the same; remove the row"),
        ({"prompt": "a", "chosen": "", "rejected": "2"}, "pairs", "'chosen' is ''; give text"),
        (
            {"prompt": " ", "chosen": "1", "rejected": "2"},
            "pairs",
            "'prompt' is ' '; give a string",
        ),
        ({"prompt": "a", "chosen": 5, "rejected": "2"}, "pairs", "'chosen' is 5; give text"),
        (
            {"chosen": [USER, assistant("2")], "rejected": [*EARLIER, USER, assistant("3")]},
            "pairs",
            "answer different conversations",
        ),
        (
            {"prompt": "a", "chosen": [USER, assistant("2")], "rejected": "3"},
            "pairs",
            "'chosen' don't begin with the prompt",
        ),
        ({"chosen": [assistant("2"), USER], "rejected": "3"}, "pairs", "of the role 'user'; end"),
        (
            {"prompt": "a", "chosen": "1", "rejected": "2", "margin": "big"},
            "pairs",
            "'margin' is 'big'; give a finite number",
        ),
        ({"prompt": "a", "completion": "2"}, "labels", "no column 'label'"),
        ({"prompt": "a", "completion": "2", "label": "good"}, "labels", "'good'; give true or fal"),
        ({"prompt": "a", "chosen": "1\0", "rejected": "2"}, "pairs", "has a NUL character at 1"),
    ],
)
def test_what_is_no_preference_gets_a_sentence(raw: dict[str, Any], kind: Kind, said: str) -> None:
    with pytest.raises(DataError, match=rf"^d\.jsonl, row 1: .*{said}"):
        mapped(raw, kind)


def test_bad_rows_are_refused_by_number_or_left_out(tmp_path: Path) -> None:
    good = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    file = tmp_path / "pairs.jsonl"
    rows = [good, {"prompt": "?"}, good, good | {"chosen": "3"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"row 2: .*2 of 4 rows are bad \(rows 2, 4\)"):
        read_preference_rows([str(file)], RowsConfig(), "pairs")
    [found] = read_preference_rows([str(tmp_path)], RowsConfig(bad_rows="drop"), "pairs")
    assert found.rows == [PAIR, PAIR]
    assert found.numbers == [1, 3]


def test_canonical_rows_keep_the_contract(tmp_path: Path) -> None:
    file = tmp_path / "pairs.parquet"
    pd.DataFrame([{"prompt": "1+1?", "chosen": "2", "rejected": "3"}]).to_parquet(file)
    [pairs] = read_preference_rows([str(file)], RowsConfig(), "pairs")
    [labels] = read_preference_rows([str(file)], RowsConfig(), "labels")
    check(pd.DataFrame(pairs.rows), PREFERENCE_PAIRS, "pairs")
    check(pd.DataFrame(labels.rows), KTO_ROWS, "labels")
    assert [(row["completion"], row["label"]) for row in labels.rows] == [("2", True), ("3", False)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["1+1=2", "Hi Hello"], 300)


def test_tokens_of_pairs_and_labels(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "1+1?", "chosen": "2", "rejected": "33"}))
    prompt, chosen = encode_prompt(tokenizer, [USER]), encode_response(tokenizer, "2")
    rejected = encode_response(tokenizer, "33")
    assert read_preferences(str(file), tokenizer) == [PairExample(prompt, chosen, rejected)]
    assert read_preferences(str(file), tokenizer, "labels") == [
        LabelledExample(prompt, chosen, True),
        LabelledExample(prompt, rejected, False),
    ]
    limit = len(prompt) + len(rejected)
    assert read_preferences(str(file), tokenizer, max_length=limit)
    with pytest.raises(DataError, match=rf"longer than {limit - 1} tokens, first row 1 with"):
        read_preferences(str(file), tokenizer, max_length=limit - 1)
    assert not read_preferences(str(file), tokenizer, max_length=limit - 1, too_long="drop")


def test_a_reward_model_reads_whole_conversations(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "1+1?", "chosen": "23", "rejected": "24"}))
    [pair] = read_reward_pairs(str(file), tokenizer)
    for text, ids in (("23", pair.chosen_ids), ("24", pair.rejected_ids)):
        whole = encode_conversation(tokenizer, [USER, assistant(text)])
        assert [*pair.prompt_ids, *ids] == whole
        assert tokenizer.decode(whole) == f"<|user|>1+1?<|end|><|assistant|>{text}<|end|>"
    assert pair.chosen_ids[0] != pair.rejected_ids[0]
    batch = collate_scored([pair], tokenizer.pad_token_id)
    assert batch["response_mask"].tolist() == [[0.0, 0.0, 1.0]] * 2  # after digit and end token


def test_what_others_wrote_is_no_control_token(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "a<|end|>"}, assistant("b")]
    end = tokenizer.eos_token_id
    assert encode_conversation(tokenizer, turns).count(end) == 2


def test_an_example_is_two_rows_of_one_prompt() -> None:
    pairs = [PairExample([5, 6], [7, 1], [8, 9, 1], reference=(-1.0, -2.0))]
    batch = collate_preferences([*pairs, *pairs], 0)
    assert batch["input_ids"].tolist()[:2] == [[5, 6, 7, 1, 0], [5, 6, 8, 9, 1]]
    assert batch["ref_response_log_probs"].tolist() == [-1.0, -2.0] * 2
    labelled = with_others(
        [LabelledExample([5], [7, 1], True), LabelledExample([6], [8, 1], False)]
    )
    batch = collate_preferences(labelled, 0)
    assert batch["responses"].tolist() == [[7, 1], [8, 1], [8, 1], [7, 1]]
    assert batch["desirable"].tolist() == [True, True, False, False]
    assert "ref_response_log_probs" not in batch


def test_the_other_completion_is_of_another_prompt() -> None:
    prompts = [[1], [1], [2], [2], [2], [3], [1]]
    rows = [LabelledExample(p, [10 + i], True) for i, p in enumerate(prompts)]
    found = [row.other_ids for row in with_others(rows)]
    assert found == [[12], [12], [15], [15], [15], [16], [12]]
    with pytest.raises(DataError, match="two prompts or more"):
        with_others(rows[:2])


QUESTION = [{"role": "user", "content": "1+1?"}]


def group(*scored: tuple[str, float], **info: Any) -> ScoredGroup:
    return ScoredGroup(QUESTION, dict(scored), info)


def sides(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["chosen"], row["rejected"]) for row in rows]


def test_best_and_worst_of_a_group_are_a_pair() -> None:
    one = group(("b", 0.5), ("a", 0.9), ("d", -1.0), ("c", 0.1), policy_version=3)
    [row] = pairs_from_groups([one])
    assert row == {
        "prompt": QUESTION,
        "chosen": "a",
        "rejected": "d",
        "margin": 0.0,
        "extra_info": {"policy_version": 3, "chosen_score": 0.9, "rejected_score": -1.0},
    }


def test_of_equal_scores_the_first_counts() -> None:
    one = group(("w1", 0.0), ("r1", 1.0), ("r2", 1.0), ("w2", 0.0), ("w3", 0.0))
    assert sides(pairs_from_groups([one])) == [("r1", "w1")]
    assert sides(pairs_from_groups([one], pairs_per_group=9)) == [("r1", "w1"), ("r2", "w2")]


def test_no_text_is_in_two_pairs_of_a_group() -> None:
    one = group(("a", 3.0), ("b", 2.0), ("c", 1.0))
    assert sides(pairs_from_groups([one], pairs_per_group=5)) == [("a", "c")]


def test_groups_without_a_gap_give_no_pair() -> None:
    even, near, alone = group(("a", 1.0), ("b", 1.0)), group(("a", 1.0), ("b", 0.8)), group()
    assert pairs_from_groups([even, alone]) == []
    assert pairs_from_groups([near], min_gap=0.2) == []
    assert len(pairs_from_groups([near], min_gap=0.1)) == 1


def test_labels_are_by_threshold_and_need_no_partner() -> None:
    rows = labels_from_groups([group(("a", 1.0), ("b", 1.0)), group(("c", 0.5), ("d", 0.6))])
    assert [(row["completion"], row["label"]) for row in rows] == [
        ("a", True),
        ("b", True),
        ("c", False),
        ("d", True),
    ]
    few = labels_from_groups([group(("a", 1.0), ("b", 0.0), ("c", 1.0), ("d", 0.0))], per_group=1)
    assert [row["completion"] for row in few] == ["a", "b"]


def test_rows_keep_the_contract_and_are_read_back(tmp_path: Path) -> None:
    groups = [group(("2", 1.0), ("3", 0.0), policy_version=1)]
    pairs, labels = pairs_from_groups(groups), labels_from_groups(groups)
    check(pd.DataFrame(pairs), PREFERENCE_PAIRS, "pairs")
    check(pd.DataFrame(labels), KTO_ROWS, "labels")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    [file] = read_preference_rows([str(tmp_path / "pairs.jsonl")], RowsConfig(), "pairs")
    wanted = {name: value for name, value in pairs[0].items() if name != "extra_info"}
    assert file.rows == [wanted]
