"""The scorer and the registry of rewards."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from once import OwnEntries

from engine.config import RewardConfig
from engine.errors import ConfigError, RewardError
from engine.rewards import Scorer, require_rewards, reward_function, scorer_identity, scorer_label
from engine.rewards.answers import answer_match
from engine.rewards.reward_function import declared_components, register_reward, resolve_reward

HERE = __name__


TEXTS = ["so 5\n#### 4", "#### 5", "I take \\boxed{B}", "(B) is right"]


ROWS = {"data_source": ["gsm8k", "gsm8k", "mmlu", "mmlu"], "ground_truth": ["4", "4", "B", "C"]}


def length(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def not_for_maths(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    if any("#" in text for text in completions):
        raise ValueError("no maths")
    return [0.5] * len(completions)


def parts(prompts: Any, completions: Sequence[str], **columns: Any) -> dict[str, list[float]]:
    return {"correct": [1.0, 0.0, 1.0, 0.0], "style": [2.0] * 4}


@contextmanager
def scorer(**settings: Any) -> Iterator[Scorer]:
    opened = Scorer(RewardConfig.model_validate({"isolation": "none", "processes": 1} | settings))
    try:
        yield opened
    finally:
        opened.close()


def test_each_source_has_its_own_reward() -> None:
    with scorer(sources={"mmlu": "multiple_choice"}) as subject:
        scores = subject.score(TEXTS, TEXTS, ROWS)
        sources = ROWS["data_source"]
        assert scores.components == subject.components == ("answer",)
        assert scores.rows == [[1.0], [0.0], [1.0], [0.0]]
        assert subject.correct(scores, sources) == [True, False, True, False]
        assert subject.answers(TEXTS, sources) == (["4", "5", "B", "B"], True)
        assert subject.well_formed(TEXTS, sources) == [True] * 4
        assert subject.well_formed(["so 4", "#### 4", "hm", "C"], sources) == [
            False, True, False, True,
        ]  # fmt: skip


def test_further_components_are_weighed_and_don_t_make_an_answer_right() -> None:
    with scorer(
        components={"length": f"{HERE}:length", "format": "think_format"},
        weights={"length": -0.5, "format": 3},
    ) as subject:
        assert subject.components == ("answer", "length", "format")
        texts = ["#### 4", "<think></think><answer></answer>"]
        scores = subject.score(texts, texts, {"ground_truth": ["4", "4"]})
        assert scores.components == subject.components
        assert scores.rows == [[1.0, 0.6, 0.0], [0.0, 3.2, 1.0]]
        assert subject.totals(scores) == pytest.approx([0.7, 1.4])
        assert subject.correct(scores, ["", ""]) == [True, False]


def test_components_of_a_reward_stand_beside_those_of_others() -> None:
    settings = {"name": f"{HERE}:parts", "components": {"length": f"{HERE}:length"}}
    with scorer(**settings, sources={"other": "answer_match"}) as subject:
        assert subject.components is None, "known after the first call"
        scores = subject.score(TEXTS, TEXTS, ROWS)
        assert scores.components == subject.components == ("correct", "style", "answer", "length")
        rows = [dict(zip(scores.components or (), row, strict=True)) for row in scores.rows]
        assert [row["style"] for row in rows] == [2.0] * 4
        assert [row["length"] for row in rows] == [len(text) / 10 for text in TEXTS]
        assert subject.correct(scores, ROWS["data_source"]) == [True, False, True, False]
        mixed = {"data_source": ["x", "x", "x", "x", "other"], "ground_truth": ["4"] * 5}
        scores = subject.score([*TEXTS, "#### 4"], [*TEXTS, "#### 4"], mixed)
        assert subject.correct(scores, mixed["data_source"])[4], "by its own component, `answer`"


def test_a_failure_of_one_part_costs_its_rows_alone(caplog: pytest.LogCaptureFixture) -> None:
    with scorer(
        name="multiple_choice", components={"mood": f"{HERE}:not_for_maths"}, on_error="zero"
    ) as subject:
        truths = {"ground_truth": ["A", "A", "B", "C"]}
        scores = subject.score(TEXTS, TEXTS, truths)
        assert sorted(scores.failures) == [0, 1]
        assert scores.rows == [[0.0, 0.0], [0.0, 0.0], [1.0, 0.5], [0.0, 0.5]]
        assert subject.correct(scores, [""] * 4) == [False, False, True, False]
    assert "failed for 2 of 4 completions" in caplog.text
    assert len(caplog.records) == 1


def maybe(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float | None]:
    """None for what is no number."""
    return [float(text) if text.isdigit() else None for text in completions]


async def maybe_async(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    return maybe(prompts, completions)


def maybe_parts(prompts: Any, completions: Any, **columns: Any) -> dict[str, list[float | None]]:
    return {
        "answer": maybe(prompts, completions),
        "size": maybe(prompts, [t[1:] for t in completions]),
    }


NONE = ["3", "a", "b4"]  # a number, neither, and a number behind a letter


@pytest.mark.parametrize("name", ["maybe", "maybe_async"])
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_a_row_to_which_a_reward_doesn_t_apply_has_no_score(
    name: str, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    with scorer(name=f"{HERE}:{name}", isolation=isolation) as subject:
        scores = subject.score(NONE, NONE, {"ground_truth": [""] * 3})
        assert {row: why.cause for row, why in scores.failures.items()} == dict.fromkeys(
            [1, 2], "not_applicable"
        )
        assert (scores.rows[0], subject.totals(scores)) == ([3.0], [3.0, 0.0, 0.0])
        assert "2 of 3 completions (not_applicable 2), which are left out" in caplog.text
        with pytest.raises(RewardError, match="returned None for completion 11, and nothing else"):
            subject.score(NONE, NONE, {"ground_truth": [""] * 3}, "fail", first_row=10)


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_where_one_component_doesn_t_apply_the_others_count(isolation: str) -> None:
    settings = {"components": {"letters": f"{HERE}:letters"}, "weights": {"size": 10}}
    with scorer(name=f"{HERE}:maybe_parts", isolation=isolation, **settings) as subject:
        scores = subject.score(NONE, NONE, {"ground_truth": [""] * 3})
        rows = [[None if math.isnan(x) else x for x in row] for row in scores.rows]
        assert scores.components == ("answer", "size", "letters")
        assert rows == [[3.0, None, None], [None, None, 1.0], [None, 4.0, 1.0]]
        assert not scores.failures
        assert subject.totals(scores) == [3.0, 1.0, 41.0]
        assert subject.correct(scores, [""] * 3) == [True, False, False], "not by the total"


def letters(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float | None]:
    return [float(sum(map(str.isalpha, text))) or None for text in completions]


def test_rows_are_named_by_their_place_in_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Of a source, in a pool, after a call on all rows has failed, and in a part of a batch."""
    texts, truths = ["B", "#### 4", "#### 4", r"\boxed{4}"], ["B", "4", "x", ""]
    columns = {"data_source": ["mmlu", "gsm8k", "gsm8k", "math"], "ground_truth": truths}
    sources = {"mmlu": "multiple_choice", "math": "math"}
    with scorer(sources=sources) as subject:
        scores = subject.score(texts, texts, columns, first_row=100)
        found = {row: str(failure) for row, failure in scores.failures.items()}
        assert found.keys() == {2, 3}
        assert found[2].startswith("row 102: ground_truth is 'x'")
        assert found[3].startswith("row 103: ground_truth is ''")
        assert "first, completion 102: row 102: ground_truth is 'x'" in caplog.text


def test_a_shaped_reward_says_what_is_right() -> None:
    """A right answer of some length is worth less than 1 and is right all the same."""
    with scorer(name="cosine_length", options={"max_length": 20}) as subject:
        texts = ["#### 4", "a long way to go to it\n#### 4", "#### 5"]
        scores = subject.score(texts, texts, {"ground_truth": ["4"] * 3})
        assert max(row[0] for row in scores.rows) < 1
        assert subject.correct(scores, [""] * 3) == [True, True, False]


def test_rewards_that_can_t_stand_side_by_side_are_refused() -> None:
    for settings, said in (
        ({"components": {"form": "answer_and_format"}}, r"reward.components.form is .*of its own"),
        (
            {"components": {"answer": "think_format"}},
            r"names \['answer'\], which the reward itself",
        ),
        ({"components": {"form": "think_format"}, "weights": {"style": 1}}, r"\['style'\]"),
        ({"sources": {"gsm8k": "no_such_rule"}}, "no_such_rule"),
    ):
        with pytest.raises(ConfigError, match=said), scorer(**settings):
            pass
    with pytest.raises(ConfigError, match="metod"):
        require_rewards(RewardConfig(sources={"a": {"options": {"metod": "strict"}}}))  # type: ignore[dict-item]


def test_what_makes_two_scorers_the_same() -> None:
    plain = RewardConfig()
    assert scorer_identity(plain) == scorer_identity(RewardConfig(timeout_s=1)) == "answer_match"
    others = [
        RewardConfig(options={"method": "flexible"}),
        RewardConfig(weights={"format": 0.5}),
        RewardConfig.model_validate({"sources": {"a": "math"}}),
        RewardConfig.model_validate({"sources": {"b": "math"}}),
    ]
    found = [scorer_identity(one) for one in (plain, *others)] + [scorer_identity(plain, "code")]
    assert len(set(found)) == len(found)
    hidden = RewardConfig(name="x", options={"api_key": "sk-1"})
    assert "sk-1" not in scorer_identity(hidden)


def test_a_scorer_is_named_by_its_reward_and_options() -> None:
    config = RewardConfig(name="m:f", options={"tol": 2}, weights={"a": 0.5, "b": 1.0})
    assert scorer_label(scorer_identity(config, "c0de")) == "m:f, tol=2, weights"
    assert scorer_label(scorer_identity(RewardConfig())) == "answer_match"
    long = scorer_identity(RewardConfig(name="m:f", options={"text": "x" * 300}))
    assert scorer_label(long) == "m:f"


MODULE = """
from engine.rewards import register_reward

def ok(prompts, completions, *, ground_truth, **columns):
    return [0.5] * len(completions)

async def ok_async(prompts, completions, ground_truth=None, **columns):
    return [0.5] * len(completions)

class Reward:
    def __call__(self, prompts, completions, *, ground_truth, **columns):
        return [0.25] * len(completions)

ok_object = Reward()

def no_columns(prompts, completions, ground_truth):
    return [0.0] * len(completions)

def one_argument(text):
    return 0.0

number = 3

def scaled(prompts, completions, *, ground_truth, scale: float = 1.0, **columns):
    return [scale] * len(completions)

@register_reward("of_user", components=("a", "b"))
def parts(prompts, completions, *, ground_truth, **columns):
    return {"a": [0.0] * len(completions), "b": [1.0] * len(completions)}
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_entries: OwnEntries) -> str:
    (tmp_path / "user_rewards_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rewards_of_test", raising=False)
    own_entries(reward_function._registry)
    return "user_rewards_of_test"


def test_fields_of_extra_info_are_columns_where_no_column_has_their_name(
    own_entries: OwnEntries,
) -> None:
    own_entries(reward_function._registry)
    seen: dict[str, Any] = {}

    @register_reward("noting")
    def noting(prompts, completions, *, ground_truth, **columns):  # type: ignore[no-untyped-def]
        seen.update(columns)
        return [0.0 for _ in completions]

    infos = [{"level": "easy", "index": 3, "prompts": 1}, {"level": "hard"}, None]
    columns = {"extra_info": infos, "index": [7, 8, 9]}
    resolve_reward("noting")(["?"] * 3, ["1"] * 3, ground_truth=["1"] * 3, **columns)
    assert seen == {"extra_info": infos, "level": ["easy", "hard", None], "index": [7, 8, 9]}


def test_a_field_of_extra_info_is_no_option_of_our_rewards() -> None:
    infos = [{"decimal_mark": ",", "method": "flexible"}, {"decimal_mark": None, "method": 3}]
    match = resolve_reward("answer_match")
    truths = {"ground_truth": ["1,5", "1.5"], "extra_info": infos}
    assert match(["?"] * 2, ["#### 1,5", "#### 1.5"], **truths) == [1.0, 1.0]
    assert match(["?"] * 2, ["1,5", "1.5"], **truths) == [0.0, 0.0]


@pytest.mark.parametrize(("name", "value"), [("ok", 0.5), ("ok_object", 0.25)])
def test_a_users_reward_is_found_by_its_path(user_module: str, name: str, value: float) -> None:
    reward = resolve_reward(f"{user_module}:{name}")
    assert reward(["p"], ["c"], ground_truth=["1"], other=["x"]) == [value]
    assert callable(resolve_reward(f"{user_module}:ok_async"))


def test_options_stand_in_the_place_of_columns(user_module: str) -> None:
    name = f"{user_module}:scaled"
    rows = (["p"], ["c"])
    assert resolve_reward(name)(*rows, ground_truth=["1"]) == [1.0]
    reward = resolve_reward(name, {"scale": "0.5"})
    assert reward(*rows, ground_truth=["1"], scale=["a column"]) == [0.5]
    with pytest.raises(ConfigError, match=r"reward.options.scal: .*did you mean 'scale'"):
        resolve_reward(name, {"scal": 0.5})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("answer_mach", r"'answer_mach' is unknown .*choose one of .*answer_match"),
        ("{m}:nothing", "has no 'nothing'"),
        ("{m}:number", "not a function"),
        ("{m}:no_columns", r"can't be called .*any_other_column.* write it as"),
        ("{m}:one_argument", "can't be called as a reward function"),
        ("nowhere.at_all:f", r"can't be imported \(ModuleNotFoundError"),
        (":f", "can't be imported"),
    ],
)
def test_wrong_names_are_refused_before_any_rollout(
    user_module: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name.format(m=user_module))


def test_a_module_that_fails_on_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward_of_test.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve_reward("broken_reward_of_test:f")


def test_registering_makes_a_name_selectable_once(own_entries: OwnEntries) -> None:
    own_entries(reward_function._registry)

    @register_reward("length")
    def length(prompts, completions, *, ground_truth, **columns):  # type: ignore[no-untyped-def]
        return [float(len(text)) for text in completions]

    assert resolve_reward("length")([], ["abc"], ground_truth=["1"]) == [3.0]
    register_reward("length")(length)
    with pytest.raises(ConfigError, match="'length' is already registered"):
        register_reward("length")(answer_match)


def test_declared_components_are_known_before_any_call(user_module: str) -> None:
    assert declared_components("answer_match") == ()
    assert declared_components(f"{user_module}:ok") is None
    assert declared_components(f"{user_module}:ok_object") is None
    assert declared_components(f"{user_module}:parts") == ("a", "b")
    assert declared_components("of_user") == ("a", "b")
    with pytest.raises(ConfigError, match="'of_usr' is unknown"):
        declared_components("of_usr")


@pytest.mark.parametrize("components", ["answer", ("answer", "format", "answer")])
def test_wrong_declarations_are_refused(components: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"reward 'x' declares .* a tuple of different names"):
        register_reward("x", components=components)
