"""Graders of answers and formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import TINY_MODEL, write_tiny_folder

from engine.config import RewardConfig
from engine.data.templates import encode_prompt, encode_response
from engine.data.tokenizer import load_tokenizer
from engine.errors import ConfigError, RewardError
from engine.final_answers import (
    choice,
    extract_answer,
    has_format,
    last_boxed,
    normalise_number,
)
from engine.models import build_model, load_model, save_model
from engine.rewards import Scorer, declared_components, open_reward, resolve_reward
from engine.rewards import score as score_math
from engine.rewards.answers import (
    answer_and_format,
    answer_match,
    cosine_length,
    exact_match,
    json_schema,
    json_text,
    math,
    multiple_choice,
    normalised_match,
    regular_expression,
    think_format,
)
from engine.rewards.calls import RewardScorer
from engine.rewards.model_based import likelihood


@pytest.fixture
def score() -> Callable[[str, str], tuple[float, float]]:
    def one(completion: str, truth: str) -> tuple[float, float]:
        result = answer_and_format(["q"], [completion], ground_truth=[truth], extra_info=[{}])
        assert list(result) == ["answer", "format"]
        return result["answer"][0], result["format"][0]

    return one


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("1+1=2\n#### 2", (1.0, 1.0)),
        ("1+1=3\n#### 3", (0.0, 1.0)),
        ("it is #### 2, I think", (1.0, 0.0)),
        ("two", (0.0, 0.0)),
    ],
)
def test_right_and_well_formed_are_scored_apart(
    score: Callable[[str, str], tuple[float, float]],
    completion: str,
    expected: tuple[float, float],
) -> None:
    assert score(completion, "2") == expected


def test_a_wrong_ground_truth_is_refused(score: Callable[[str, str], tuple[float, float]]) -> None:
    with pytest.raises(RewardError, match=r"row 0: ground_truth is 'two'"):
        score("#### 2", "two")


def test_it_declares_what_it_returns() -> None:
    reward = resolve_reward("answer_and_format")
    texts = ["#### 1", "1"]
    assert reward(["?", "?"], texts, ground_truth=["1", "1"]) == answer_and_format(
        ["?", "?"], texts, ground_truth=["1", "1"]
    )
    assert declared_components("answer_and_format") == ("answer", "format")


def weights(components: tuple[str, ...], given: dict[str, float]) -> list[float]:
    scorer = Scorer(RewardConfig())
    scorer.config = RewardConfig(name="r", weights=given)
    return scorer.weights(components)


def test_weights_come_in_the_components_order() -> None:
    names = ("answer", "format", "length")
    assert weights(names, {"length": -0.5, "answer": 2}) == [2.0, 1.0, -0.5]
    assert weights((), {}) == [1.0]


@pytest.mark.parametrize(
    ("components", "given", "message"),
    [
        (("answer",), {"anwser": 2.0}, r"\['anwser'\], which reward 'r' .* are \['answer'\]"),
        ((), {"answer": 2.0}, r"which reward 'r' .* are \[\]: correct or remove"),
    ],
)
def test_wrong_weights_are_refused(
    components: tuple[str, ...], given: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        weights(components, given)


GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("text", "answer", "formatted"),
    [
        ("<<23+5=28>>28\n#### 28", "28", True),
        ("#### 28\n", "28", True),
        ("####28", "28", True),
        ("#### $1,234.50", "1234.5", True),
        ("#### -5.", "-5", True),
        ("#### -$5", "-5", True),
        ("#### $-5", "-5", True),
        ("#### +7", "7", True),
        ("#### 007", "7", True),
        ("#### .50", "0.5", True),
        ("#### -0.0", "0", True),
        ("#### 3\n#### 4", "4", False),
        ("#### 28 apples", "28", False),
        ("#### 28\nThat is all.", "28", False),
        ("so #### 28", "28", False),
        ("#### 1e5", None, False),
        ("#### 1/2", None, False),
        ("#### 1.2.3", None, False),
        ("#### 28apples", None, False),
        ("#### twenty", None, False),
        ("#### 5\n####", None, False),
        ("####\n28", None, False),
        ("The answer is 28", None, False),
        ("", None, False),
        ("#### " + "9" * 5000, None, True),
    ],
)
def test_reading_an_answer(text: str, answer: str | None, formatted: bool) -> None:
    assert extract_answer(text) == answer
    assert has_format(text) is formatted


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 28", "28"),
        ("so $1,234.50 in total", "1234.5"),
        ("it costs -3.5 dollars", "-3.5"),
        ("50% off", "50"),
        ("x=12km", "12"),
        ("a 3 and a 4", "4"),
        ("12:30, then 1,000,000.", "1000000"),
        ("no number", None),
        ("9" * 5_000_000, None),
        ("-" * 5_000_000, None),
    ],
)
def test_the_last_number_of_a_text(text: str, answer: str | None) -> None:
    assert extract_answer(text, method="flexible") == answer
    assert answer_match([""], [text], ground_truth=[answer or "1"], method="flexible") == [
        float(answer is not None)
    ]


@given(number=st.decimals(-(10**9), 10**9, places=3))
def test_writings_of_one_number_are_one(number: object) -> None:
    plain = normalise_number(f"{number:f}")
    assert plain is not None
    assert normalise_number(f"${number:,.5f}") == plain
    assert extract_answer(f"#### {number:,.3f}.") in (plain, None)
    assert float(plain) == float(str(number))


@given(a=st.integers(-(10**20), 10**20), b=st.integers(-(10**20), 10**20))
def test_only_equal_numbers_match(a: int, b: int) -> None:
    scores = answer_match(["", ""], [f"#### {a}", f"#### {a:,}"], ground_truth=[b, str(a)])
    assert scores == [float(a == b), 1.0]


def test_scores_are_one_or_zero() -> None:
    completions = ["#### 1,000", "#### 1000.00", "#### 999", "1000", "#### 1000\n#### 1"]
    scores = answer_match([""] * 5, completions, ground_truth=["1000"] * 5, kind=["a"] * 5)
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("truth", ["abc", None, "", "1/2"])
def test_a_ground_truth_that_is_no_number_is_named(truth: object) -> None:
    with pytest.raises(RewardError, match=r"row 1: ground_truth is"):
        answer_match(["", ""], ["#### 1", "#### 1"], ground_truth=["1", truth])


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not on this machine")
def test_every_gsm8k_solution_scores_one() -> None:
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    truths = [answer.rpartition("####")[2] for answer in answers]
    assert answer_match(answers, answers, ground_truth=truths) == [1.0] * 1319
    assert all(has_format(answer) for answer in answers)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\boxed{7}+\boxed{8}}", "8"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        ("no box", None),
        ("\\boxed{" + "{" * 5_000_000, None),
        ("\\boxed{" + "9" * 5_000_000 + "}", None),
    ],
)
def test_what_stands_in_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "truth", "exact", "alike"),
    [
        (" Paris\n", "Paris", 1.0, 1.0),
        ("the  PARIS.", "Paris", 0.0, 1.0),
        ("Lyon", ["Paris", "Lyon"], 1.0, 1.0),
        ("lyon!", ["Paris", "Lyon"], 0.0, 1.0),
        ("It is Paris", "Paris", 0.0, 0.0),
        ("7", 7, 1.0, 1.0),
    ],
)
def test_letter_by_letter_or_normalised(
    text: str, truth: object, exact: float, alike: float
) -> None:
    assert exact_match([""], [text], ground_truth=[truth]) == [exact]
    assert normalised_match([""], [text], ground_truth=[truth]) == [alike]


def test_what_follows_a_mark_counts() -> None:
    texts = ["Answer: no. Answer: yes", "yes"]
    assert exact_match([""] * 2, texts, ground_truth=["yes"] * 2, after="Answer:") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "truth", "value"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", r"\dfrac12", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{\boxed{\frac{4}{8}}}", r"\frac12", 1.0),
        (r"\boxed{(1, 2]}", r"(1,2]", 1.0),
        (r"\boxed{[1, 2]}", r"(1,2]", 0.0),
        (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
        (r"\boxed{\text{east}}", r"\text{east}", 1.0),
        (r"\boxed{3}, no, \boxed{4}", "3", 0.0),
        (r"\boxed{4", "4", 0.0),
        (r"so $x = 7$", "7", 1.0),
        ("no idea", "7", 0.0),
        (r"\boxed{12}", r"The sum is 12, so \boxed{12}.", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
    ],
)
def test_answers_are_compared_as_mathematics(text: str, truth: str, value: float) -> None:
    assert math([""], [text], ground_truth=[truth]) == [value]


def test_only_a_box_counts_where_asked_for() -> None:
    texts = ["so $x = 7$", r"\boxed{7}"]
    assert math(["", ""], texts, ground_truth=["7", "7"], boxed_only=True) == [0.0, 1.0]


@pytest.fixture
def pool() -> Iterator[RewardScorer]:
    opened = open_reward("math", processes=1, sample_timeout_s=0.7)
    yield opened
    opened.close()


def test_what_explodes_costs_its_deadline_and_no_other_completion(pool: RewardScorer) -> None:
    texts = [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{0.5}",
        r"\boxed{10!!!!!}",
        "\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}",
        "\\boxed{" + "9" * 3_000_000 + "}",
        "{" * 1_000_000,
        r"\boxed{\frac{2}{4}}",
    ]
    columns = {"ground_truth": [r"\frac{1}{2}"] * len(texts)}
    scores = score_math(pool, [""] * len(texts), texts, columns, 30.0, on_error="zero")
    assert [row[0] for row in scores.rows] == [0, 1, 0, 0, 0, 0, 1]
    assert scores.failures.keys() <= {0, 2, 3}
    assert 0 in scores.failures
    assert "raise reward.sample_timeout_s" in str(scores.failures[0])


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("Answer: **D**", "D"),
        ("B", "B"),
        ("(b)", "B"),
        ("A or B? Choice B", "B"),
        ("Not A. I'd say C", "C"),
        (r"so \boxed{\text{D}}", "D"),
        ("I don't know", None),
        ("", None),
        ("A" * 1_000_000, None),
    ],
)
def test_the_letter_that_a_text_settles_on(text: str, letter: str | None) -> None:
    assert choice(text) == letter


def test_a_truth_is_a_letter_or_a_place() -> None:
    assert multiple_choice([""] * 4, ["B"] * 4, ground_truth=["b", "(B)", 1, "2"]) == [1, 1, 1, 0]
    with pytest.raises(RewardError, match=r"row 0: ground_truth is 'BC'; .* needs a letter"):
        multiple_choice([""], ["B"], ground_truth=["BC"])


def found(pattern: str, texts: list[str], truths: list[str]) -> list[float]:
    return regular_expression([""] * len(texts), texts, ground_truth=truths, pattern=pattern)


def test_a_pattern_is_found_or_its_last_answer_is_right() -> None:
    assert found(r"\bcats?\b", ["a cat", "a category"], ["", ""]) == [1, 0]
    answers = ["say 3, no: say 4", "say 3", "nothing"]
    assert found(r"say (?P<answer>\d)", answers, ["4", "4", "4"]) == [1, 0, 0]


@pytest.mark.parametrize(
    ("pattern", "message"), [("", "set reward.options.pattern"), ("(", "'\\('")]
)
def test_a_pattern_that_is_none(pattern: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        found(pattern, ["a"], ["a"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>2+2</think>\n<answer>4</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>4</answer><think>2+2</think>", 0.0),
        ("<think>2+2</think> so <answer>4</answer>", 0.0),
        ("<think>2+2</think><answer>4", 0.0),
        ("<think>2<think>+2</think><answer>4</answer>", 0.0),
        ("4", 0.0),
    ],
)
def test_tags_stand_once_in_order_and_closed(text: str, value: float) -> None:
    assert think_format([""], [text]) == [value]


def test_other_tags() -> None:
    assert think_format([""], ["<plan>go</plan>"], tags=("plan",)) == [1.0]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', 1.0),
        ('So:\n```json\n{"a": 1}\n```\nDone.', 1.0),
        ('```\n{"a": "x"}\n``` or ```\n{"a": 2}\n```', 1.0),
        ('{"a": "x"}', 0.0),
        ("{}", 0.0),
        ("not JSON", 0.0),
        ("NaN", 0.0),
        ("[" * 100_000, 0.0),
        ('{"a": ' + "9" * 1_000_000 + "}", 0.0),
    ],
)
def test_completions_that_keep_a_schema(text: str, value: float) -> None:
    assert json_schema([""], [text], ground_truth=[None], schema=SCHEMA) == [value]


def test_the_schema_may_be_the_rows_own() -> None:
    assert json_schema([""], ["3"], ground_truth=['{"type": "integer"}']) == [1.0]
    with pytest.raises(RewardError, match="the JSON schema is none"):
        json_schema([""], ["3"], ground_truth=['{"type": "intger"}'])
    assert json_text("``` 1 ```") == "1"


def test_a_reference_reaches_nothing_outside() -> None:
    with pytest.raises(Exception, match=r"example\.invalid"):
        json_schema([""], ["3"], ground_truth=[None], schema={"$ref": "http://example.invalid/s"})


def test_short_right_answers_are_worth_most_and_short_wrong_ones_least() -> None:
    texts = ["x" * length + "#### 5" for length in (0, 94, 194, 900)]
    right = cosine_length([""] * 4, texts, ground_truth=["5"] * 4, max_length=200)
    wrong = cosine_length([""] * 4, texts, ground_truth=["4"] * 4, max_length=200)
    assert right == pytest.approx([1.0, 0.75, 0.5, 0.5], abs=2e-3)
    assert wrong == pytest.approx([-1.0, -0.75, -0.5, -0.5], abs=2e-3)


def test_the_answers_rule_is_one_of_the_engines_with_one_score() -> None:
    with pytest.raises(RewardError, match="'answer_and_format' is not one of the engine's"):
        cosine_length([""], [""], ground_truth=["1"], answer="answer_and_format")
    texts = cosine_length([""], ["B"], ground_truth=["B"], answer="multiple_choice")
    assert texts == pytest.approx([1.0])


TEXTS = ["4", "four, which is 2+2", "5", "<|end|>"]


USER = {"role": "user", "content": "2+2?"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with one tokenizer."""
    place = tmp_path_factory.mktemp("likelihood")
    first = write_tiny_folder(place / "first")
    tokenizer = load_tokenizer(first)
    other = build_model(TINY_MODEL, tokenizer, seed=1)
    return [first, save_model(other, tokenizer, place / "second")]


def exact(folder: Path, text: str) -> torch.Tensor:
    """Log-probs of the tokens that training gives a response."""
    tokenizer = load_tokenizer(folder)
    prompt, answer = encode_prompt(tokenizer, [USER]), encode_response(tokenizer, text)
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = load_model(folder)(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    found = logits.double().log_softmax(1).gather(1, torch.tensor(answer)[:, None])
    return found[:, 0]


def scores(texts: list[str], **options: Any) -> list[float]:
    return likelihood(["2+2?"] * len(texts), texts, **options)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("batch_size", [1, 3])
def test_it_is_the_log_prob_that_training_sees(folders: list[Path], batch_size: int) -> None:
    one, two = map(str, folders)
    own = {"model": one, "batch_size": batch_size}
    logs = [exact(folders[0], text) for text in TEXTS[:3]]
    assert scores(TEXTS[:3], **own) == pytest.approx([float(x.sum()) for x in logs], abs=1e-4)
    means = [2 * float(x.mean()) for x in logs]
    assert scores(TEXTS[:3], beta=2.0, per_token=True, **own) == pytest.approx(means, abs=1e-4)
    ratios = [
        float(x.sum() - exact(folders[1], t).sum()) for x, t in zip(logs, TEXTS, strict=False)
    ]
    assert scores(TEXTS[:3], reference=two, **own) == pytest.approx(ratios, abs=1e-4)
    assert all(abs(ratio) > 1e-3 for ratio in ratios)


@pytest.mark.usefixtures("one_thread")
def test_what_a_template_writes_before_an_answer_does_not_end_it(
    folders: list[Path], tmp_path: Path
) -> None:
    """gpt-oss writes "<|channel|>final<|message|>" there."""
    folder = copytree(folders[0], tmp_path / "channels")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '<|user|>' if m.role == 'assistant' }}"
        "{{ m.content }}<|end|>{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    prompt = tokenizer.encode("<|user|>2+2?<|end|>\n<|assistant|>", add_special_tokens=False)
    answer = tokenizer.encode("<|user|>4<|end|>", add_special_tokens=False)
    with torch.no_grad():
        logits = load_model(folder)(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    logs = logits[len(prompt) - 1 : -1].log_softmax(1).gather(1, torch.tensor(answer)[:, None])
    assert scores(["4"], model=str(folder)) == pytest.approx([float(logs.sum())], abs=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_a_completion_can_t_end_itself(folders: list[Path]) -> None:
    early = scores([TEXTS[3]], model=str(folders[0]))[0]
    tokenizer = load_tokenizer(folders[0])
    assert tokenizer.eos_token == TEXTS[3]
    end = float(exact(folders[0], "")[-1])
    assert early < end - 1.0  # its letters are tokens of text, and cost something


@pytest.mark.usefixtures("one_thread")
def test_what_has_no_log_prob_is_refused(folders: list[Path], tmp_path: Path) -> None:
    longer = "4" * 5000
    for options, text, said in (
        ({}, "4", "needs reward.options.model"),
        ({"model": str(tmp_path)}, "4", "loaded as AutoModelForCausalLM"),
        ({"model": str(folders[0])}, longer, "lower data.max_response_length"),
    ):
        with pytest.raises(RewardError, match=said):
            scores([text], **options)
