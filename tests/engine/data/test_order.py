"""The order of rows: batches, resumable loaders."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_engine import arithmetic_rows
from transformers import PreTrainedTokenizerFast

from engine.batch import Batch
from engine.config import SamplingConfig
from engine.data.collate import (
    collate_completions,
    collate_prompts,
    pad,
    shared_prompt_batches,
    token_budget_batches,
)
from engine.data.loader import PromptLoader, add_prompt_ids, make_rl_data_loader
from engine.data.order import (
    EpochOrder,
    Order,
    PassRates,
    difficulty_of,
    make_order,
    observed_rates,
)
from engine.data.templates import encode_prompt
from engine.errors import ConfigError, DataError

SOURCES = ["a"] * 30 + ["b"] * 10


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "prompt": [f"p{i}" for i in range(40)],
            "row": range(40),
            "data_source": SOURCES,
            "extra_info": [{"level": f"Level {i % 3}"} for i in range(40)],
        }
    )


def weighted(weights: dict[str, float], seed: int = 0) -> Order:
    rows = [{"data_source": name} for name in SOURCES]
    return make_order(rows, seed, True, SamplingConfig(weights=weights), 1)


def test_sources_come_by_weight_and_each_row_once_an_epoch_of_its_source() -> None:
    order = weighted({"a": 1.0, "b": 3.0})
    rows = [order.next() for _ in range(4000)]
    shares = Counter(SOURCES[row] for row in rows)
    assert 2900 < shares["b"] < 3100
    for name, size in (("a", 30), ("b", 10)):
        own = [row for row in rows if SOURCES[row] == name]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    assert order.epoch == shares["a"] // 30
    other = weighted({"a": 1.0, "b": 3.0}, seed=1)
    assert rows != [other.next() for _ in range(4000)]


@pytest.mark.parametrize("weights", [{}, {"a": 1.0, "b": 9.0}])
def test_no_prompt_is_used_more_often_than_asked(weights: dict[str, float]) -> None:
    loader = PromptLoader(frame(), 20, 0, sampling=SamplingConfig(weights=weights, max_uses=2))
    uses = Counter(row["row"] for _ in range(4) for row in loader.next_batch())
    assert set(uses.values()) == {2}
    assert len(uses) == 40
    with pytest.raises(
        DataError, match=r"prompts were used 2 times; raise data\.sampling\.max_uses"
    ):
        loader.next_batch()


def test_an_epoch_goes_from_easy_to_hard() -> None:
    loader = PromptLoader(frame(), 40, 0, sampling=SamplingConfig(curriculum="extra_info.level"))
    first, second = loader.next_batch(), loader.next_batch()
    for batch in (first, second):
        levels = [row["extra_info"]["level"] for row in batch]
        assert levels == sorted(levels)
    assert [row["row"] for row in first] != [row["row"] for row in second]
    assert difficulty_of([{"x": 2}, {"x": "-1.5 of 7"}], "x") == [2.0, -1.5]
    with pytest.raises(
        DataError, match=r"sampling\.curriculum='x\.y': row 2 has None there, and no number"
    ):
        difficulty_of([{"x": {"y": 1}}, {"x": 2}], "x.y")


@given(
    seen=st.integers(0, 3000),
    weights=st.sampled_from([{}, {"a": 1.0, "b": 1.0}, {"a": 5.0, "b": 0.5}]),
    curriculum=st.sampled_from(["", "extra_info.level"]),
    max_uses=st.sampled_from([0, 200]),
)
def test_a_resumed_order_goes_on_exactly(
    seen: int, weights: dict[str, float], curriculum: str, max_uses: int
) -> None:
    sampling = SamplingConfig(weights=weights, curriculum=curriculum, max_uses=max_uses)
    whole = PromptLoader(frame(), 1, 3, sampling=sampling)
    for _ in range(seen):
        whole.next_batch()
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptLoader(frame(), 1, 3, sampling=sampling)
    resumed.load_state_dict(state)
    both = [[loader.next_batch()[0]["row"] for _ in range(60)] for loader in (whole, resumed)]
    assert both[0] == both[1]
    assert whole.state_dict() == resumed.state_dict()


def test_a_state_of_another_mix_is_refused() -> None:
    mixed = PromptLoader(frame(), 1, 3, sampling=SamplingConfig(weights={"a": 1, "b": 2}))
    plain = PromptLoader(frame(), 1, 3)
    for one, other in ((mixed, plain), (plain, mixed)):
        with pytest.raises(DataError, match="weights is"):
            one.load_state_dict(other.state_dict())


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of \['a', 'b'\]: 'b' is in one only"):
        weighted({"a": 1.0})
    with pytest.raises(ConfigError, match="'c' is in one only"):
        weighted({"a": 1.0, "b": 1.0, "c": 1.0})
    with pytest.raises(ConfigError, match="weights must be above 0"):
        weighted({"a": 1.0, "b": 0.0})


def test_the_first_epoch_is_as_drawn_from_the_seed() -> None:
    order = EpochOrder(5, seed=0, shuffle=False)
    assert [order.next() for _ in range(7)] == [0, 1, 2, 3, 4, 0, 1]


SIZE = 12


def loader(batch: int = 2, size: int = SIZE, **sampling: Any) -> PromptLoader:
    frame = pd.DataFrame(
        {
            "prompt": [[{"role": "user", "content": f"p{i}"}] for i in range(size)],
            "row": range(size),
            "data_source": ["a"] * (size // 2) + ["b"] * (size - size // 2),
        }
    )
    config = SamplingConfig.model_validate({"pass_rate": [0.1, 0.9]} | sampling)
    return PromptLoader(frame, batch, 0, sampling=config)


def test_an_epoch_has_the_prompts_between_the_bounds_and_tries_the_others_again() -> None:
    rates = PassRates(4, (0.1, 0.9), recheck=2, max_uses=0, at_least=1)
    for row, rate in enumerate((0.0, 1.0, 0.1, 0.9)):
        rates.observe(row, rate)
    epochs = []
    for rate in (0.0, 0.0, 0.0, 0.5):
        rates.observe(0, rate)
        rates.begin_epoch()
        epochs.append(rates.chosen.tolist())
    inside = [False, False, True, True]
    assert epochs == [inside, inside, [True] * 4, [True, False, True, True]]


def test_what_is_solved_or_hopeless_is_not_in_the_loader_s_next_epoch() -> None:
    subject = loader(2, pass_rate_recheck=0)
    rates = {0: 0.0, 1: 1.0, 2: 0.1, 3: 0.9}
    first = []
    for _ in range(SIZE // 2):
        rows = subject.next_batch()
        first += [row["row"] for row in rows]
        for row in rows:
            subject.observe(row["prompt"], rates.get(row["row"], 0.5))
    assert sorted(first) == list(range(SIZE))
    late = set(first[-2:])  # observed when the next epoch was drawn already
    second = [row["row"] for _ in range(5) for row in subject.next_batch()]
    assert len(set(second)) == 10
    assert not {0, 1} & {*second} - late


def test_a_batch_s_worth_of_prompts_is_left_and_they_are_the_nearest() -> None:
    rates = PassRates(5, (0.4, 0.6), recheck=0, max_uses=0, at_least=3)
    for row, rate in enumerate((0.0, 0.3, 0.5, 0.7, 1.0)):
        rates.observe(row, rate)
    rates.begin_epoch()
    assert rates.chosen.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("weights", [{}, {"a": 1.0, "b": 3.0}])
def test_no_prompt_is_used_more_often_by_pass_rates_than_asked(weights: dict[str, float]) -> None:
    subject, draw = loader(1, max_uses=3, weights=weights), random.Random(0)
    uses: Counter[int] = Counter()
    for _ in range(3 * SIZE):
        (row,) = subject.next_batch()
        uses[row["row"]] += 1
        subject.observe(row["prompt"], draw.choice([0.0, 0.5, 1.0]))
    with pytest.raises(DataError, match=r"were used 3 times; raise data\.sampling\.max_uses"):
        subject.next_batch()
    assert set(uses.values()) == {3}
    assert len(uses) == SIZE


@given(
    seen=st.integers(0, 60),
    ahead=st.integers(0, 3),
    weights=st.sampled_from([{}, {"a": 1.0, "b": 2.0}]),
    max_uses=st.sampled_from([0, 90]),
)
def test_a_resumed_loader_goes_on_exactly(
    seen: int, ahead: int, weights: dict[str, float], max_uses: int
) -> None:
    given: dict[str, Any] = {"weights": weights, "max_uses": max_uses, "pass_rate_recheck": 1}
    whole, draw = loader(1, **given), random.Random(seen)
    waiting: list[Any] = []  # given, and not observed yet, as with prompts that are prefetched
    for _ in range(seen):
        waiting += whole.next_batch()
        if len(waiting) > ahead:
            whole.observe(waiting.pop(0)["prompt"], draw.random())
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = loader(1, **given)
    resumed.load_state_dict(state)
    both = []
    for subject in (whole, resumed):
        chosen = random.Random(1)
        both.append([])
        for _ in range(40):
            (row,) = subject.next_batch()
            both[-1].append(row["row"])
            subject.observe(row["prompt"], chosen.random())
    assert both[0] == both[1]
    assert whole.state_dict() == resumed.state_dict()


def test_a_state_of_other_bounds_or_none_is_refused() -> None:
    plain = loader(pass_rate=None)
    for other in (plain, loader(pass_rate=[0.2, 0.8]), loader(pass_rate_recheck=1)):
        with pytest.raises(DataError, match="pass_rate"):
            loader().load_state_dict(other.state_dict())


def test_rates_are_of_scored_completions_group_by_group() -> None:
    first, second, third = ([{"role": "user", "content": text}] for text in "abc")
    batch = Batch(
        {
            "group_ids": torch.tensor([0, 1, 0, 1, 2]),
            "reward_error": torch.tensor([False, False, False, True, True]),
        },
        {
            "prompt": [first, second, first, second, third],
            "reward_correct": [True, False, False, True, True],
        },
    )
    assert list(observed_rates(batch)) == [(first, 0.5), (second, 0.0)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pass_rate": [0.9, 0.1]}, "must be two shares, the lower first"),
        ({"pass_rate": [0.0, 1.5]}, "must be two shares"),
        ({"pass_rate_recheck": 5}, "needs sampling.pass_rate"),
    ],
)
def test_bounds_that_hold_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplingConfig.model_validate(values)


def loader_frame(size: int) -> pd.DataFrame:
    return pd.DataFrame({"prompt": [f"p{i}" for i in range(size)], "row": range(size)})


def take(loader: PromptLoader, batches: int) -> list[int]:
    return [row["row"] for _ in range(batches) for row in loader.next_batch()]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(size=st.integers(1, 30), batch=st.integers(1, 40), seed=st.integers(0, 9))
def test_every_row_comes_once_an_epoch_in_full_batches(size: int, batch: int, seed: int) -> None:
    loader = PromptLoader(loader_frame(size), batch, seed)
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
def test_a_loader_resumed_anywhere_goes_on_exactly(
    size: int, batch: int, seen: int, shuffle: bool
) -> None:
    whole = PromptLoader(loader_frame(size), batch, 1, shuffle)
    take(whole, seen)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptLoader(loader_frame(size), batch, 1, shuffle)
    resumed.load_state_dict(state)
    assert take(resumed, 12) == take(whole, 12)
    assert resumed.state_dict() == whole.state_dict()


def test_epochs_and_seeds_differ_and_shuffling_can_be_off() -> None:
    loader = PromptLoader(loader_frame(50), 50, 0)
    first, second = take(loader, 1), take(loader, 1)
    assert first != second
    assert loader.epoch == 2
    assert take(PromptLoader(loader_frame(50), 50, 1), 1) != first
    assert take(PromptLoader(loader_frame(50), 20, 0, shuffle=False), 3) == [*range(50), *range(10)]


def test_changing_a_given_row_leaves_the_data_alone() -> None:
    loader = PromptLoader(loader_frame(1), 1, 0)
    loader.next_batch()[0]["row"] = 99
    assert loader.next_batch()[0]["row"] == 0


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptLoader(loader_frame(9), 2, 0), "rows"),
        (PromptLoader(loader_frame(8), 2, 5), "seed"),
        (PromptLoader(loader_frame(8), 2, 0, shuffle=False), "shuffle"),
        (PromptLoader(loader_frame(8).iloc[::-1], 2, 0), "digest"),
    ],
)
def test_a_state_of_other_data_is_refused(other: PromptLoader, named: str) -> None:
    loader = PromptLoader(loader_frame(8), 2, 0)
    with pytest.raises(DataError, match=f"{named} is"):
        loader.load_state_dict(other.state_dict())


def test_a_damaged_state_is_refused() -> None:
    loader = PromptLoader(loader_frame(8), 2, 0)
    with pytest.raises(DataError, match="position 8 of 8"):
        loader.load_state_dict({**loader.state_dict(), "position": 8})


def test_no_rows_and_no_batch_size_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        PromptLoader(loader_frame(0), 2, 0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        PromptLoader(loader_frame(2), 0, 0)


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


def test_layout_by_hand() -> None:
    prompts = collate_prompts(arithmetic_rows(2), [[5], [6, 7, 8]])
    batch = collate_completions(
        prompts, [1, 0, 0], [[9], [3, 4], [2, 2]], [[-1.0], [-2, -3], [-4, -5]], pad_token_id=1
    )
    assert batch["input_ids"].tolist() == [[6, 7, 8, 9, 1], [1, 1, 5, 3, 4], [1, 1, 5, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert batch["prompts"].tolist() == [[6, 7, 8], [1, 1, 5], [1, 1, 5]]
    assert batch["responses"].tolist() == [[9, 1], [3, 4], [2, 2]]
    assert batch["response_mask"].tolist() == [[1, 0], [1, 1], [1, 1]]
    assert batch["rollout_log_probs"].tolist() == [[-1, 0], [-2, -3], [-4, -5]]
    assert batch["group_ids"].tolist() == [1, 0, 0]
    assert list(batch.columns["ground_truth"]) == ["2", "0", "0"]
    assert "prompt_ids" not in batch


def test_prompts_without_a_ground_truth() -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"style": "model"}}]
    assert list(collate_prompts(rows, [[1]]).columns["ground_truth"]) == [None]


def test_a_truth_comes_from_either_place_and_from_one() -> None:
    row = {"prompt": [], "reward_model": {"ground_truth": "5"}, "ground_truth": float("nan")}
    assert list(collate_prompts([row], [[1]]).columns["ground_truth"]) == ["5"]
    with pytest.raises(DataError, match=r"row 1 of a step: column 'ground_truth' is '6', but"):
        collate_prompts([row, {**row, "ground_truth": "6"}], [[1], [2]])


@pytest.mark.parametrize("name", ["prompts", "input_ids", "completion", "partial_group"])
def test_a_column_with_the_name_of_a_field_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"column '{name}' has the name of a field that the engine"):
        collate_prompts([{"prompt": [], name: 1}], [[1]])


def test_tokens_in_a_column_don_t_replace_the_prompt() -> None:
    assert collate_prompts([{"prompt_ids": [1, 2]}], [[1, 2]]).columns["prompt_ids"][0] == [1, 2]
    with pytest.raises(DataError, match="'prompt_ids' that are not the tokens of their prompts"):
        collate_prompts([{"prompt_ids": [7]}], [[1, 2]])


def test_rows_with_other_columns_are_refused() -> None:
    with pytest.raises(DataError, match=r"differ in their columns: \['level'\] are in some only"):
        collate_prompts([{"prompt": []}, {"prompt": [], "level": 1}], [[1], [2]])


def test_nothing_to_collate_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        collate_prompts([], [])
    prompts = Batch({"group_ids": torch.arange(1)}, {"prompt_ids": [[1]]})
    with pytest.raises(DataError, match="no completions"):
        collate_completions(prompts, [], [], [], pad_token_id=0)


def test_pad_takes_its_dtype_from_the_filling() -> None:
    assert pad([[1], [2, 3]], 0, side="left").dtype == torch.long
    assert pad([[1], [2, 3]], 0.0, side="right").dtype == torch.float32
    assert pad([[], []], 0, side="right").shape == (2, 1)


LENGTHS = st.lists(st.integers(0, 60), max_size=80)


@given(lengths=LENGTHS, budget=st.integers(1, 200))
def test_budget_holds_and_every_row_comes_once(lengths: list[int], budget: int) -> None:
    batches = token_budget_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        longest = max(lengths[i] for i in batch)
        assert len(batch) * longest <= budget or len(batch) == 1


@given(lengths=LENGTHS, budget=st.integers(1, 200))
def test_no_batch_could_take_the_first_row_of_the_next(lengths: list[int], budget: int) -> None:
    batches = token_budget_batches(lengths, budget)
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * lengths[following[0]] > budget


def test_a_row_above_the_budget_is_alone() -> None:
    assert token_budget_batches([5, 100, 5], 10) == [[0, 2], [1]]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens=0"):
        token_budget_batches([1], 0)


@st.composite
def groups_of_rows(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Groups, shuffled over the rows, with rows' lengths and prompts' lengths."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    order = draw(st.permutations(range(sum(sizes))))
    groups, lengths, prompts = [], [0] * len(order), [0] * len(order)
    for size in sizes:
        group, order, prompt = sorted(order[:size]), order[size:], draw(st.integers(1, 20))
        groups.append(group)
        for row in group:
            prompts[row], lengths[row] = prompt, prompt + draw(st.integers(0, 30))
    return groups, lengths, prompts


@given(rows=groups_of_rows(), budget=st.integers(1, 150))
def test_shared_prompts_count_once_a_batch(
    rows: tuple[list[list[int]], list[int], list[int]], budget: int
) -> None:
    groups, lengths, prompts = rows
    batches = shared_prompt_batches(groups, lengths, prompts, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        tokens = sum(lengths[i] - prompts[i] for i in batch)
        tokens += sum(prompts[group[0]] for group in groups if set(group) & set(batch))
        assert tokens <= budget or len(batch) == 1
    for group in groups:
        whole = prompts[group[0]] + sum(lengths[i] - prompts[i] for i in group)
        homes = [batch for batch in batches if set(group) & set(batch)]
        assert len(homes) == 1 or whole > budget, "a group that fits stays together"
