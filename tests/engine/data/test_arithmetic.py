import random
import re
from itertools import pairwise

import pandas as pd
import pytest

from engine.config import DataConfig
from engine.data.rows import normalise, prompt_text
from engine.data.sources import Splits, load_splits, source_digest
from engine.data.word_problems import (
    CORPORA,
    LEVELS,
    STORY_TEMPLATES,
    Level,
    bare_answer,
    deal_problems,
    slip_answer,
    styled_answer,
    worked_answer,
)
from engine.errors import ConfigError, DataError

MARK = re.compile(r"<<(\d+)([-+*])(\d+)=(\d+)>>(\d+)")
SMALL = DataConfig(sft_size=1500, train_size=200, validation_size=50, test_size=100)


@pytest.fixture(scope="module")
def splits() -> Splits:
    return load_splits(SMALL, seed=3)


def marks(response: str) -> list[tuple[int, str, int, int]]:
    """Parse a worked answer's steps; every line but the last must be one."""
    *lines, _ = response.split("\n")
    parsed = []
    for line in lines:
        found = MARK.fullmatch(line)
        assert found, line
        assert found[4] == found[5]
        parsed.append((int(found[1]), found[2], int(found[3]), int(found[4])))
    return parsed


def apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4, 5])
def test_worked_answers_are_right_and_use_the_numbers_of_the_question(difficulty: int) -> None:
    for problem in deal_problems({"test": 300}, difficulty, seed=0)["test"]:
        response = worked_answer(problem)
        steps = marks(response)
        assert len(steps) == LEVELS[difficulty].steps
        value = steps[0][0]
        for left, operator, right, result in steps:
            assert left == value
            assert result == apply(left, operator, right)
            assert 0 < result <= LEVELS[difficulty].largest
            value = result
        assert response.endswith(f"\n#### {value}")
        given = {int(n) for n in re.findall(r"\d+", problem.question)}
        words = {2} if "doubles" in problem.question else set()
        words |= {3} if "triples" in problem.question else set()
        assert {steps[0][0], *(right for _, _, right, _ in steps)} == given | words


def test_a_slip_has_one_wrong_result_carried_through() -> None:
    rng = random.Random(0)
    for problem in deal_problems({"test": 500}, 3, seed=1)["test"]:
        steps = marks(slip_answer(problem, rng))
        wrong = [s for s in steps if s[3] != apply(*s[:3])]
        assert len(wrong) == 1
        assert all(later[0] == earlier[3] for earlier, later in pairwise(steps))
        assert min(s[3] for s in steps) >= 0
        assert steps[-1][3] != problem.answer


def test_splits_have_the_sizes_and_columns_of_the_contract(splits: Splits) -> None:
    sizes = {name: len(frame) for name, frame in splits.frames().items()}
    assert sizes == {
        "sft_train": 1500,
        "sft_validation": 50,
        "train": 200,
        "validation": 50,
        "test": 100,
    }
    rl = splits.train.iloc[4].to_dict()
    assert list(rl) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert rl["data_source"] == "arithmetic"
    assert rl["prompt"][0]["role"] == "user"
    assert rl["reward_model"]["style"] == "rule"
    assert rl["reward_model"]["ground_truth"].isdigit()
    assert (rl["extra_info"]["split"], rl["extra_info"]["index"]) == ("train", 4)
    assert list(splits.sft_train.columns) == ["prompt", "response", "extra_info"]


def test_no_prompt_is_in_two_splits(splits: Splits) -> None:
    texts = [
        normalise(prompt_text(p)) for frame in splits.frames().values() for p in frame["prompt"]
    ]
    assert len(set(texts)) == len(texts) == 1900


def test_no_two_problems_differ_in_words_alone() -> None:
    dealt = deal_problems({"test": 3000, "train": 9000}, 2, seed=0)
    keys = [problem.key for rows in dealt.values() for problem in rows]
    assert len(set(keys)) == 12000
    assert len({key[0] for key in keys}) >= 12


def test_styles_have_the_shares_of_their_corpora(splits: Splits) -> None:
    corpus_of = {template.name: template.corpus for template in STORY_TEMPLATES}
    extra = pd.DataFrame(splits.sft_train["extra_info"].tolist())
    shares = extra["style"].value_counts(normalize=True)
    assert shares["worked"] == pytest.approx(0.41, abs=0.04)
    assert shares["bare"] == pytest.approx(0.52, abs=0.04)
    assert shares["slip"] == pytest.approx(0.08, abs=0.03)
    by_corpus = extra.groupby(extra["kind"].map(corpus_of))["style"]
    for corpus, styles in by_corpus:
        share = styles.value_counts(normalize=True)
        assert share["worked"] == pytest.approx(CORPORA[str(corpus)]["worked"], abs=0.07)
        assert share["bare"] == pytest.approx(CORPORA[str(corpus)]["bare"], abs=0.07)


def test_responses_are_written_in_the_style_that_the_row_names(splits: Splits) -> None:
    for row in splits.sft_train.to_dict("records"):
        response, style = row["response"], row["extra_info"]["style"]
        if style == "bare":
            assert re.fullmatch(r"#### \d+", response)
        else:
            right = all(s[3] == apply(*s[:3]) for s in marks(response))
            assert right == (style == "worked")


def test_a_mix_of_ones_gives_one_style(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = deal_problems({"test": 1}, 2, seed=0)["test"][0]
    for style, text in (("worked", worked_answer(problem)), ("bare", bare_answer(problem))):
        mix = {"worked": 0.0, "bare": 0.0, "slip": 0.0, style: 1.0}
        monkeypatch.setitem(CORPORA, problem.template.corpus, mix)
        assert styled_answer(problem, random.Random(0)) == (style, text)


def test_shares_add_up() -> None:
    for mix in CORPORA.values():
        assert sum(mix.values()) == pytest.approx(1)


def test_the_same_seed_gives_the_same_rows_and_another_seed_does_not(splits: Splits) -> None:
    again, other = load_splits(SMALL, seed=3), load_splits(SMALL, seed=4)
    for name, frame in splits.frames().items():
        pd.testing.assert_frame_equal(frame, again.frames()[name])
        assert not frame.equals(other.frames()[name])


def test_the_test_split_does_not_depend_on_the_other_sizes(splits: Splits) -> None:
    grown = SMALL.model_copy(update={"sft_size": 1600, "train_size": 300, "validation_size": 60})
    pd.testing.assert_frame_equal(load_splits(grown, seed=3).test, splits.test)


def test_the_digest_is_that_of_the_parameters(splits: Splits) -> None:
    assert splits.source_digest == source_digest(SMALL, 3)
    harder = SMALL.model_copy(update={"difficulty": 3})
    larger = SMALL.model_copy(update={"test_size": 101})
    digests = {
        source_digest(SMALL, 3),
        source_digest(SMALL, 4),
        source_digest(harder, 3),
        source_digest(larger, 3),
    }
    assert len(digests) == 4


def test_asking_for_more_problems_than_there_are_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVELS, 1, Level(steps=1, largest=9, product_share=0.0))
    with pytest.raises(DataError, match=r"difficulty=1 has only about \d{3} distinct .*train 6000"):
        deal_problems({"test": 10, "train": 6000}, 1, seed=0)


def test_the_largest_number_is_an_option_of_the_source() -> None:
    sizes = {"sft_size": 1, "train_size": 300, "validation_size": 8, "test_size": 64}
    small = DataConfig(difficulty=1, options={"largest": 12}, **sizes)
    rows = load_splits(small, 0).train
    numbers = [
        int(number) for prompt in rows["prompt"] for number in re.findall(r"\d+", str(prompt))
    ]
    assert max(numbers) <= 12
    assert max(int(rule["ground_truth"]) for rule in rows["reward_model"]) <= 12
    own = DataConfig(difficulty=1, **sizes)
    assert source_digest(small, 0) != source_digest(own, 0)
    whole = DataConfig(difficulty=1, options={"largest": 0}, **sizes)
    assert source_digest(whole, 0) == source_digest(own, 0)
    with pytest.raises(ConfigError, match=r"data\.options\.largest=3 leaves no problems; give 10"):
        load_splits(DataConfig(difficulty=1, options={"largest": 3}, **sizes), 0)
