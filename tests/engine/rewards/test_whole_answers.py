"""No grader takes a part of the answer for the answer: tables to add rows to, and random junk.

A row is what a policy wrote, the ground truth, and the score that it must get.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.config import RewardConfig
from engine.errors import RewardError
from engine.final_answers import stated_answer
from engine.rewards import Scorer, resolve_reward


def score(name: str, text: str, truth: object, **options: object) -> float:
    reward: Any = resolve_reward(name, options)
    [value] = reward(["q"], [text], ground_truth=[truth])
    return float(value)


# What follows `####`.
NUMBERS = [
    # lists, ranges and hedges
    ("18 or 19", "18", 0),
    ("18 or 19", "19", 0),
    ("18 or nineteen", "18", 0),
    ("18 (or 19)", "18", 0),
    ("18 and 19", "18", 0),
    ("18-20", "18", 0),
    ("18–20", "18", 0),
    ("18 to 20", "18", 0),
    ("18~20", "18", 0),
    ("18, 19", "18", 0),
    ("18,19", "1819", 0),
    ("18;19", "18", 0),
    ("18 19", "18", 0),
    ("18\n19", "18", 0),
    ("18\nor 19", "18", 0),
    ("18\n- 19\n- 20", "18", 0),
    ("18. Wait, nineteen", "18", 0),
    ("18, not 19", "18", 0),
    ("18 is wrong", "18", 0),
    ("18?", "18", 0),
    ("18 oder neunzehn", "18", 0),
    # chains and operators
    ("18 / 19", "18", 0),
    ("18/19", "18", 0),
    ("18*2", "18", 0),
    ("18 x 2", "18", 0),
    ("18 × 2", "18", 0),
    ("18**2", "18", 0),
    ("18^2", "18", 0),
    ("18²", "18", 0),
    ("18²", "182", 0),
    ("18½", "18", 0),
    ("18!", "18", 0),
    ("18 ± 1", "18", 0),
    (r"18 \pm 1", "18", 0),
    ("18+", "18", 0),
    ("18 = 18", "18", 0),
    ("18=20-2", "18", 0),
    ("~18", "18", 0),
    ("≈18", "18", 0),
    ("<18", "18", 0),
    ("not 18", "18", 0),
    ("--5", "5", 0),
    ("- 5", "5", 0),
    ("+-5", "-5", 0),
    # scales
    ("1.5 million", "1.5", 0),
    ("1.5 million", "1", 0),
    ("18 dozen", "18", 0),
    ("18 and a half", "18", 0),
    ("18k", "18", 0),
    ("18 k", "18", 0),
    (r"18 \text{ million}", "18", 0),
    ("18万", "18", 0),
    ("18 squared", "18", 0),
    ("18 x", "18", 0),
    ("18π", "18", 0),
    # separators
    ("1 234", "1", 0),
    ("1 234", "1234", 1),
    ("1\u202f234", "1234", 1),
    ("1'234", "1234", 1),
    ("1,234,567", "1234567", 1),
    ("12,34,567", "1234567", 1),
    (r"1{,}234", "1234", 1),
    (r"1\,234", "1234", 1),
    ("1,8", "18", 0),
    ("1,8", "1.8", 0),
    ("1,8", "1", 0),
    ("1,2345", "12345", 0),
    ("1 2345", "12345", 0),
    ("2 *180*", "2180", 0),
    ("**1** 234", "1234", 0),
    (r"\boxed{1}\boxed{234}", "1234", 0),
    ("1.234", "1234", 0),
    ("1_8", "18", 0),
    ("1.2.3", "1.2", 0),
    ("18:30", "18", 0),
    ("18,", "18", 0),
    ("18...", "18", 0),
    ("1e5", "1", 0),
    ("0x12", "18", 0),
    # Unicode
    ("−5", "-5", 1),
    ("－5", "-5", 1),
    ("١٨", "18", 1),
    ("१८", "18", 1),
    ("１８", "18", 1),
    ("𝟏𝟖", "18", 1),
    ("١٫٥", "1.5", 1),
    ("1\u200b8", "18", 1),
    ("①⑧", "18", 0),
    ("I8", "18", 0),
    ("1O", "10", 0),
    # markup and currency
    ("**18**", "18", 1),
    ("*18*", "18", 1),
    ("__18__", "18", 1),
    ("`18`", "18", 1),
    ('"18"', "18", 1),
    ("**18** apples", "18", 1),
    ("**$18**", "18", 1),
    ("$18$", "18", 1),
    ("$$18$$", "18", 1),
    (r"\(18\)", "18", 1),
    (r"\boxed{18}", "18", 1),
    (r"$\boxed{18}$", "18", 1),
    (r"\boxed{\boxed{18}}", "18", 1),
    (r"\boxed{18} or \boxed{19}", "18", 0),
    (r"\text{18}", "18", 1),
    (r"18\text{ cm}", "18", 1),
    ("18</answer>", "18", 1),
    ("18<|im_end|>", "18", 0),
    ("~~18~~", "18", 0),
    ("€18", "18", 1),
    ("18 €", "18", 1),
    ("18€", "18", 1),
    ("-£18", "-18", 1),
    ("$-18", "-18", 1),
    ("US$18", "18", 1),
    ("$1,234.50", "1234.5", 1),
    (r"\$1,234.50", "1234.5", 1),
    ("$18 $19", "18", 0),
    # units, remarks and ends
    ("18.", "18", 1),
    ("18.00", "18", 1),
    ("+18", "18", 1),
    ("18%", "18", 1),
    ("18 percent", "18", 1),
    (r"18\%", "18", 1),
    ("18°", "18", 1),
    (r"18^\circ", "18", 1),
    ("18 apples.", "18", 1),
    ("18 miles per hour", "18", 1),
    ("18 km/h", "18", 1),
    ("18 m^2", "18", 1),
    ("18 cm²", "18", 1),
    ("$18/hour", "18", 1),
    ("18元", "18", 1),
    ("18, I think", "18", 1),
    ("18\nThat is all.", "18", 1),
    ("18cm", "18", 0),
    ("18 " + "very " * 100 + "many", "18", 0),
    ("(18)", "18", 0),
    ("", "0", 0),
    # a truth in other writings
    ("18", "$18.00", 1),
    ("1234", "1,234", 1),
    ("1234", "1 234", 1),
    ("-5", "−5", 1),
    ("18", "١٨", 1),
    ("18", 18, 1),
    ("1.5", 1.5, 1),
]


@pytest.mark.parametrize(("text", "truth", "value"), NUMBERS)
def test_a_number_is_read_to_its_end(text: str, truth: object, value: int) -> None:
    assert score("answer_match", f"2+2=4\n#### {text}", truth) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 19\n#### 18", 1),
        ("#### 18\n#### 19", 0),
        ("#### 18 #### 19", 0),
        ("<think>#### 19</think>\n#### 18", 1),
        ("<think>is it #### 18?</think>", 0),
        ("<think>\n#### 18", 0),
        ("so it is 19</think>#### 18", 1),
        ("####\n18", 0),
        ("**#### 18**", 1),
        ("The answer is 18", 0),
    ],
)
def test_the_last_mark_outside_of_thinking_counts(text: str, value: int) -> None:
    assert score("answer_match", text, "18") == value


@pytest.mark.parametrize(
    ("text", "truth", "mark", "value"),
    [
        ("1,8", "1,8", ",", 1),
        ("1,8", 1.8, ",", 1),
        ("1.234,50 €", "1234,5", ",", 1),
        ("1 234,5", "1234,5", ",", 1),
        ("1.234", "1234", ",", 1),
        ("1.234", "1.234", ".", 1),
        ("1.8", "1,8", ",", 0),
        ("1,234", "1234", ",", 0),
        ("1,8", "1.8", None, 0),
        ("1.8", "1.8", None, 1),
    ],
)
def test_a_row_says_how_numbers_are_written(
    text: str, truth: object, mark: str | None, value: int
) -> None:
    columns = {"ground_truth": ["1", truth], "decimal_mark": [None, mark]}
    texts = ["#### 1", f"#### {text}"]
    assert resolve_reward("answer_match")([""] * 2, texts, **columns) == [1, value]
    by_parts: Any = resolve_reward("answer_and_format")([""] * 2, texts, **columns)
    assert by_parts["answer"] == [1, value]
    scorer = Scorer(RewardConfig())
    answers, _ = scorer.answers(texts, ["", ""], columns)
    assert value <= (answers[1] is not None)
    assert answers[0] == "1"
    scorer.close()


def test_a_mark_is_an_option_too_and_another_one_is_refused() -> None:
    assert score("answer_match", "#### 1,8", "1,8", decimal_mark=",") == 1
    assert score("math", r"\boxed{1,5x}", r"\frac{3x}{2}", decimal_mark=",") == 1
    with pytest.raises(RewardError, match=r"row 0: decimal_mark is ';'; give '.' or ','"):
        resolve_reward("answer_match")([""], ["#### 1"], ground_truth=["1"], decimal_mark=[";"])


MATHS = [
    # chains and equations
    (r"\boxed{1=2=3=4}", "4", 0),
    ("\\boxed{3\0 4}", "4", 0),
    ("\\boxed{\\frac{3}{7}\u2028\\frac{2}{5}}", r"\frac{2}{5}", 0),
    (r"\boxed{4=5}", "5", 0),
    (r"\boxed{4=5}", "x=5", 0),
    (r"\boxed{1/2 = 0.4}", "0.4", 0),
    (r"\boxed{1/2 = 0.5}", "0.5", 0),
    (r"\boxed{\sqrt{8}=2\sqrt2}", r"2\sqrt2", 0),
    (r"\boxed{x=4=5}", "5", 0),
    (r"\boxed{y=5}", "x=5", 0),
    (r"\boxed{18 \approx 19}", "18", 0),
    (r"\boxed{18 \to 19}", "18", 0),
    (r"\boxed{1<2<4}", "4", 0),
    (r"\boxed{x<4}", "4", 0),
    (r"\boxed{2x=10}", "10", 0),
    (r"\boxed{2x=10}", "5", 0),
    (r"\boxed{\text{not } x=5}", "5", 0),
    (r"\boxed{x+y=7}", "7", 1),
    (r"\boxed{(x,y)=(2,3)}", "(2,3)", 1),
    (r"\boxed{x_1=1, x_2=2}", "1,2", 1),
    (r"\boxed{x=\pm 2}", "2,-2", 1),
    (r"\boxed{y = 2x + 3}", "2x - y + 3 = 0", 1),
    (r"\boxed{5 \mod 7}", "5", 0),
    (r"\boxed{5}=\boxed{6}", "6", 0),
    (r"\boxed{5} = 6", "5", 0),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{5}", "x=5", 1),
    (r"\boxed{\text{Area} = 5}", "5", 1),
    (r"\boxed{f(x)=x^2}", "x^2", 1),
    (r"\boxed{2x+3=y}", "y=2x+3", 1),
    (r"\boxed{1<x<4}", "1<x<4", 1),
    (r"\boxed{x \in [1,2)}", "[1,2)", 1),
    # other numbers
    (r"\boxed{6}", "5", 0),
    (r"\boxed{-5}", "5", 0),
    (r"\boxed{x=6}", "5", 0),
    (r"\boxed{05}", "5", 1),
    ("so $x=6$", "5", 0),
    # lists, ranges and hedges
    (r"\boxed{4 \text{ or } 5}", "5", 0),
    (r"\boxed{4, 5}", "5", 0),
    (r"\boxed{4, 5}", "5,4", 1),
    (r"\boxed{5, 5}", "5", 0),
    (r"\boxed{x=1 \text{ or } x=2}", "1,2", 1),
    (r"\boxed{18 \text{ to } 19}", "18", 0),
    (r"\boxed{18 \pm 1}", "19", 0),
    (r"\boxed{18;19}", "18", 0),
    (r"\boxed{18 \quad 19}", "18", 0),
    (r"\boxed{5 \\ 6}", "6", 0),
    (r"\boxed{5 6}", "5", 0),
    (r"\boxed{5 6}", "56", 0),
    (r"\boxed{12 345}", "12345", 1),
    (r"\boxed{5_6}", "5", 0),
    (r"\boxed{maybe 18}", "18", 0),
    (r"\boxed{18?}", "18", 0),
    (r"\boxed{5} or \boxed{6}", "6", 0),
    (r"$\boxed{5}$ or $\boxed{6}$.", "6", 0),
    (r"\boxed{5}\text{ or }\boxed{6}", "6", 0),
    (r"\boxed{5}, \boxed{6}", "6", 0),
    (r"\boxed{5} and \boxed{6}", "5,6", 1),
    (r"\boxed{5}, or 6", "5", 0),
    (r"\boxed{5} \text{ or } 6", "5", 0),
    (r"5 or \boxed{6}", "6", 0),
    (r"-\boxed{5}", "5", 0),
    (r"2\boxed{5}", "5", 0),
    (r"\boxed{5}^2", "5", 0),
    (r"\boxed{5}\sqrt{2}", "5", 0),
    (r"\boxed{5}x", "5", 0),
    (r"\boxed{5}.5", "5", 0),
    (r"\boxed{5},5", "5", 0),
    (r"\boxed{5} + c", "5", 0),
    (r"\sqrt{\boxed{5}}", "5", 0),
    (r"\frac{\boxed{5}}{6}", "5", 0),
    (r"(\boxed{5},6)", "5", 0),
    (r"\boxed{5\text{ or more}}", "5", 0),
    (r"\boxed{\log_2 8}", "3", 1),
    (r"\boxed{5}\text{ units}", "5", 1),
    (r"\boxed{5}\%", "5", 1),
    (r"\boxed{5} million", "5", 0),
    (r"\boxed{18\text{ million}}", "18", 0),
    (r"\boxed{18 \text{ dozen}}", "18", 0),
    # boxes
    (r"$\boxed 5$", "5", 1),
    (r"\boxed5", "5", 1),
    (r"\fbox{5}", "5", 1),
    (r"\boxed{}", "5", 0),
    (r"\boxed{5", "5", 0),
    (r"\boxed{\boxed{5}}", "5", 1),
    (r"\boxed{\boxed{7}+\boxed{8}}", "8", 0),
    (r"\boxed{5 \boxed{6}}", "6", 0),
    (r"first \boxed{4}. No: \boxed{5}", "5", 1),
    (r"\boxed{5}. Check: 2+3=5", "5", 1),
    (r"**\boxed{5}**", "5", 1),
    (r"- \boxed{5}", "5", 1),
    (r"\[x = \boxed{5}\]", "5", 1),
    (r"<think>\boxed{4}</think>\boxed{5}", "5", 1),
    (r"<think>\boxed{5}", "5", 0),
    # units, markup and digits
    (r"\boxed{18 apples}", "18", 1),
    (r"\boxed{10\text{ cm}^2}", "10", 1),
    (r"\boxed{10\,\mathrm{cm}}", "10", 1),
    (r"\boxed{\$18}", "18", 1),
    (r"\boxed{18\%}", "18", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{١٨}", "18", 1),
    (r"\boxed{−5}", "-5", 1),
    (r"\boxed{1 234}", "1234", 1),
    (r"\boxed{1{,}234}", "1234", 1),
    (r"\boxed{1,8}", "18", 0),
    (r"\boxed{100,200,300}", "100, 200, 300", 1),
    (r"\boxed{\dfrac{1}{2}}", r"\frac12", 1),
    (r"\boxed{\text{(C)}}", "C", 1),
    # without a box
    ("The answer is 8.", "8", 1),
    ("The final answer is $8$. I hope it is correct.", "8", 1),
    ("so $x=7$", "7", 1),
    ("So $x=3$ and $y=4$, hence $x+y=7$.", "7", 1),
    (r"The area is $25\pi$ square units.", r"25\pi", 1),
    ("Hence the answer is 3/8.", "3/8", 1),
    ("Hence the probability is 3/8.", "3/8", 0),
    ("so $x=7$ or $x=8$", "8", 0),
    ("5 or $6$", "6", 0),
    ("it is 8, not 7", "7", 0),
    ("it is 7 or 8", "8", 0),
    ("it is 3+5", "5", 0),
    ("$5$ million", "5", 0),
    ("#### 8", "8", 1),
    ("#### 8 or 9", "8", 0),
]


@pytest.mark.parametrize(("text", "truth", "value"), MATHS)
def test_latex_is_read_to_its_end(text: str, truth: str, value: int) -> None:
    assert score("math", text, truth) == value


CHOICES = [
    ("B, I think.", "B"),
    ("C. A triangle has three sides.", "C"),
    ("answer: c", "C"),
    ("c", "C"),
    (r"\boxed{b}", "B"),
    ("B. I chose it since A is wrong", "B"),
    ("b.", "B"),
    ("(d)", "D"),
    ("Ｂ", "B"),
    ("**B**", "B"),
    ("B) 15", "B"),
    ("I", "I"),
    ("I think it's C.", "C"),
    ("I don't know", None),
    ("A cat sat.", None),
    ("The answer is a triangle.", None),
    ("The answer is A because it fits.", "A"),
    ("The answer is B. A is wrong because it is small.", "B"),
    ("The answer is B, not A.", "B"),
    ("The answer is not B", None),
    ("The answer is B or C.", None),
    (r"\boxed{B = C}", None),
    ("Answer: B → C", None),
    ("The answer is B and C.", None),
    ("answer: b or c", None),
    ("Answer: B.\nAnswer: C", "C"),
    ("Option B is right, since option A has two.", "B"),
    ("A is wrong, B is right", None),
    ("neither A nor B, so C", None),
    ("It is C rather than D", "C"),
    ("Everything except B", None),
    ("It's B or C", None),
    ("B/C", None),
    ("B-C", None),
    ("B. Wait, C.", None),
    ("A, B, C, D", None),
    ("A B C D", None),
    ("A. B. C. D.", None),
    ("A) 12\nB) 13\nC) 14", None),
    (r"\boxed{A, B}", None),
    (r"\boxed{A} or \boxed{B}", None),
    (r"\boxed{\textbf{(C)}\ 5}", "C"),
    (r"\boxed{C. Paris}", "C"),
    ("<think>A or B? C!</think>B", "B"),
    ("<think>The answer is B", None),
]


@pytest.mark.parametrize(("text", "letter"), CHOICES)
def test_a_choice_is_one_letter(text: str, letter: str | None) -> None:
    for truth in "ABCDI":
        assert score("multiple_choice", text, truth) == (truth == letter)


TEXTS = [
    ("normalised_match", "-5", "5", 0),
    ("normalised_match", "−5", "-5", 1),
    ("normalised_match", "1.5", "15", 0),
    ("normalised_match", ".5", "5", 0),
    ("normalised_match", "18-20", "1820", 0),
    ("normalised_match", "3/4", "34", 0),
    ("normalised_match", "1,8", "18", 0),
    ("normalised_match", "$1,234.", "1234", 1),
    ("normalised_match", "the", "A", 0),
    ("normalised_match", "Cafe\u0301", "café", 1),
    ("normalised_match", "Paris or Rome", "Paris", 0),
    ("normalised_match", "<think>Rome?</think> Paris.", "Paris", 1),
    ("exact_match", "<think>Rome?</think> Paris", "Paris", 1),
    ("exact_match", "Paris, Rome", "Paris", 0),
    ("exact_match", "<think>Paris", "Paris", 0),
]


@pytest.mark.parametrize(("name", "text", "truth", "value"), TEXTS)
def test_a_text_is_the_answer_as_a_whole(name: str, text: str, truth: str, value: int) -> None:
    assert score(name, text, truth) == value


EMPTY = {
    "answer_match": ["", " ", None, r"\boxed{}", "$$"],
    "math": ["", " ", None, r"\boxed{}", "$$"],
    "exact_match": ["", " ", None, [], ["18", ""]],
    "normalised_match": ["", " ", None, "!", [], ["18", ""]],
    "multiple_choice": ["", " ", None],
}


@pytest.mark.parametrize(("name", "truth"), [(name, t) for name in EMPTY for t in EMPTY[name]])
def test_an_empty_truth_is_a_bad_row(name: str, truth: object) -> None:
    for text in ("", r"\boxed{}", "None"):
        with pytest.raises(RewardError, match="row 0: ground_truth is"):
            score(name, text, truth)


def test_an_empty_truth_of_a_pattern_is_a_bad_row() -> None:
    with pytest.raises(RewardError, match="row 0: ground_truth is '', which is empty"):
        score("regular_expression", "y", "", pattern="(?P<answer>x*)")


@pytest.mark.parametrize(
    ("strict", "text", "truth"),
    [
        ("answer_match", "#### 18 or 19", "19"),
        ("answer_match", "I say 18", "18"),
        ("math", r"\boxed{1=2=3=4}", "4"),
        ("math", r"\boxed{4 \text{ or } 5}", "5"),
        ("math", r"\boxed{4 \text{ or } 5}", r"Twice 2.5, so \boxed{5}."),
        ("multiple_choice", "A, B, C, D", "D"),
        ("multiple_choice", "A, B, C, D", "3"),
        ("normalised_match", "Paris or Rome", "Rome"),
        ("normalised_match", "Paris or Rome", ["Lyon", "Rome"]),
    ],
)
def test_a_lenient_reading_accepts_what_no_score_does(
    strict: str, text: str, truth: object
) -> None:
    assert score(strict, text, truth) == 0
    scorer = Scorer(RewardConfig(name=strict, processes=1))
    assert scorer.leniently_right([text], [""], [truth]) == [True]
    assert scorer.leniently_right(["nothing"], [""], [truth]) == [False]
    scorer.close()


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        ("so it is 18", "18", True),
        ("#### 17", "18", False),
        ("The answer is (B).", "B", True),
        ("hence \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True),
        ("He lived in New Lyon.", "New Lyon", True),
        ("print(1)", '{"inputs": [], "outputs": []}', None),
        ("nothing", None, None),
    ],
)
def test_a_reward_without_a_lenient_reading_has_that_of_its_truth(
    text: str, truth: object, right: bool | None
) -> None:
    scorer = Scorer(RewardConfig(name="think_format"))
    assert scorer.leniently_right([text], [""], [truth]) == [right]


def test_an_answer_without_a_box_is_what_a_text_ends_with() -> None:
    assert stated_answer(r"so $7$ or $8$") == "7 or 8"
    assert stated_answer("The answer is 7 apples.") == "7 apples."
    assert stated_answer("$x=5$, so 3+5=8") is None


# Truth and a remainder that changes what is meant never score: what is random here is the truth,
# the remainder, and what surrounds them.

_NUMBER = st.one_of(st.integers(-(10**6), 10**6), st.decimals(-999, 999, places=2)).map(str)
_OTHER = st.integers(2, 999)
_JOINS = ["or", "and", "to", "-", "–", "/", "*", "+", "±", "=", ",", ";", ":", "^", "|", "vs", "x"]
_MORE_NUMBERS = st.builds(
    lambda join, other, space: f"{space}{join}{space}{other}",
    st.sampled_from(_JOINS),
    _OTHER,
    st.sampled_from([" ", "  ", "\n"]),
)
_SCALES = st.sampled_from(
    [" million", " thousand", " dozen", " and a half", " squared", "k", " x", "!", "?", "...", "e5"]
)
_JUNK = st.text(st.sampled_from("+*/=^<>±×÷|&#@{}[]∑√²½①"), min_size=1, max_size=6)
_REMAINDER = st.one_of(_MORE_NUMBERS, _SCALES, _JUNK)


@given(truth=_NUMBER, remainder=_REMAINDER, lead=st.sampled_from(["", "so ", "3+4=7\n"]))
def test_a_number_and_a_remainder_never_score(truth: str, remainder: str, lead: str) -> None:
    assume(set(remainder) != {"*"})  # the end of bold
    assert score("answer_match", f"{lead}#### {truth}{remainder}", truth) == 0


@given(truth=_NUMBER, remainder=st.text(max_size=12))
def test_a_number_that_scores_has_no_number_or_operator_after_it(
    truth: str, remainder: str
) -> None:
    assume("#" not in remainder)
    if score("answer_match", f"#### {truth}{remainder}", truth):
        if "." in truth:
            remainder = remainder.lstrip("0")
        assert not any(c.isnumeric() or c in "+=^<>|&@" for c in remainder)


_CHAIN_SIGNS = (
    *(" = ", r" \approx ", r" \to ", ", ", "; ", " or ", r" \text{ or } ", r" \text{ and } "),
    *(r" \\ ", r" \quad ", r" \text{ to } ", r" \mod ", "_"),
)
_PLACES = st.sampled_from([r"\boxed{?}", r"so $\boxed{?}$.", "= \\fbox{?}\n", "so $?$", "#### ?"])


@given(
    truth=st.integers(1, 10**4),
    sign=st.sampled_from(_CHAIN_SIGNS),
    other=_OTHER,
    first=st.booleans(),
    place=_PLACES,
)
def test_latex_with_more_than_the_truth_never_scores(
    truth: int, sign: str, other: int, first: bool, place: str
) -> None:
    assume(other != truth)
    content = f"{truth}{sign}{other}" if first else f"{other}{sign}{truth}"
    assert score("math", place.replace("?", content), str(truth)) == 0


@given(
    letters=st.lists(st.sampled_from("BCDEFGH"), min_size=2, max_size=5, unique=True),
    join=st.sampled_from([" or ", ", ", " and ", "/", " ", "; ", " & ", "\n", ", or ", "-"]),
    place=st.sampled_from(["?", "The answer is ?", "Answer: ?", r"\boxed{?}", "It's ?."]),
)
def test_several_letters_are_no_choice(letters: list[str], join: str, place: str) -> None:
    text = place.replace("?", join.join(letters))
    assert [score("multiple_choice", text, letter) for letter in letters] == [0] * len(letters)


@given(truth=_NUMBER, remainder=st.one_of(_MORE_NUMBERS, _SCALES))
def test_a_text_with_more_than_the_truth_never_scores(truth: str, remainder: str) -> None:
    assume(remainder.strip("!?. \n"))
    for name in ("exact_match", "normalised_match"):
        assert score(name, truth + remainder, truth) == 0
