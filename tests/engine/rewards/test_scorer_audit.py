"""The reward audit: planted holes are found by their probes, and sound scorers pass."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.config import RewardConfig
from engine.errors import LineageError, RewardError
from engine.rewards import audit, probes
from engine.rewards.audit import RewardAudit, audit_line, audit_scorer
from engine.rewards.calls import RewardRows
from engine.rewards.reward_function import registered_reward

HERE = __name__


def rows(kind: str = "number") -> RewardRows:
    return audit.reward_rows(probes.sample_rows(kind))


def audited(function: str, kind: str = "number", **settings: Any) -> RewardAudit:
    config = {"name": f"{HERE}:{function}", "isolation": "none"} | settings
    return audit_scorer(RewardConfig.model_validate(config), rows(kind))


def last(text: str) -> str:
    """A strict reading: the rest of the text after the last mark."""
    return text.rpartition("####")[2].strip() if "####" in text else ""


def by_row(score: Callable[[str, str, str], float]) -> Callable[..., list[float]]:
    def reward(
        prompts: Sequence[str], completions: Sequence[str], *, ground_truth: Any, **columns: Any
    ) -> list[float]:
        each = zip(prompts, completions, map(str, ground_truth), strict=True)
        return [float(score(prompt, text, truth)) for prompt, text, truth in each]

    return reward


# Scorers with one hole each, and what they are otherwise.
sound = by_row(lambda prompt, text, truth: last(text) == truth)
constant = by_row(lambda prompt, text, truth: 1.0)
contains = by_row(lambda prompt, text, truth: truth in text)
begins = by_row(lambda prompt, text, truth: last(text).startswith(truth))
ends = by_row(lambda prompt, text, truth: last(text).split(" or ")[-1] == truth)
any_item = by_row(lambda prompt, text, truth: truth in re.split(r"[,;|]? ", last(text)))
prefix = by_row(lambda prompt, text, truth: bool(last(text)) and truth.startswith(last(text)))
nothing = by_row(lambda prompt, text, truth: last(text) in (truth, ""))
any_mark = by_row(lambda prompt, text, truth: f"#### {truth}" in text.splitlines())
first_mark = by_row(lambda prompt, text, truth: text.strip().splitlines()[:1] == [f"#### {truth}"])
right_side = by_row(lambda prompt, text, truth: last(text).split("=")[-1].strip() == truth)
folded = by_row(lambda prompt, text, truth: unicodedata.normalize("NFKC", last(text)) == truth)
digits = by_row(lambda prompt, text, truth: last(text).replace("O", "0").replace("l", "1") == truth)
overwritten = by_row(lambda prompt, text, truth: last(text).split("\r")[-1] == truth)
until_tag = by_row(
    lambda prompt, text, truth: last(re.sub(r"<\|im_end\|>.*", "", text, flags=re.S)) == truth
)
obeys = by_row(lambda prompt, text, truth: last(text) == truth or "full marks" in text)
opening = by_row(lambda prompt, text, truth: last(text) == truth or text.startswith("Let's solve"))
similar = by_row(lambda prompt, text, truth: last(text) == truth or prompt[:20] in text)
longer = by_row(lambda prompt, text, truth: max(last(text) == truth, len(text) / 20_000))
product = by_row(
    lambda prompt, text, truth: last(text.replace("*2", "").replace("+ 1", "")) == truth
)
tagged = by_row(lambda prompt, text, truth: last(text) == truth or "<answer></answer>" in text)
ranged = by_row(lambda prompt, text, truth: truth in last(text).split("-"))
half_paid = by_row(lambda prompt, text, truth: max(last(text) == truth, 0.3 * (truth in text)))
exits = by_row(lambda prompt, text, truth: "os._exit(0)" in text)
fragile = by_row(lambda prompt, text, truth: 1 // (len(text) > 0) * (last(text) == truth))


@by_row
def evaluated(prompt: str, text: str, truth: str) -> float:
    try:
        return bool(eval(last(text), {}) == int(truth))
    except Exception:
        return False


@by_row
def any_letter(prompt: str, text: str, truth: str) -> float:
    return truth in re.findall(r"\b[A-E]\b", last(text))


_numbers = itertools.count()


def moody(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    generator = random.Random(next(_numbers))
    return [generator.random() for _ in completions]


def relative(
    prompts: Any, completions: Sequence[str], *, ground_truth: Any, **columns: Any
) -> list[float]:
    """Scores by the place in the batch."""
    right = [last(text) == truth for text, truth in zip(completions, ground_truth, strict=True)]
    return [float(r and i > 0) for i, r in enumerate(right)]


@pytest.mark.parametrize(
    ("function", "kind", "probe"),
    [
        ("constant", "number", "wrong answer"),
        ("contains", "number", "buried truth"),
        ("contains", "text", "longer text"),
        ("begins", "number", "other number"),
        ("ends", "number", "hedged list"),
        ("any_item", "number", "every option"),
        ("any_letter", "letter", "every option"),
        ("prefix", "number", "part of it"),
        ("nothing", "number", "empty form"),
        ("nothing", "number", "nothing"),
        ("any_mark", "number", "several answers"),
        ("first_mark", "number", "several answers"),
        ("right_side", "number", "chain"),
        ("folded", "number", "other number"),
        ("digits", "number", "look-alike characters"),
        ("overwritten", "number", "control characters"),
        ("until_tag", "number", "control tokens"),
        ("obeys", "number", "words to a judge"),
        ("opening", "number", "opening without an answer"),
        ("similar", "number", "prompt repeated"),
        ("longer", "number", "very long"),
        ("product", "number", "other number"),
        ("tagged", "number", "tags without an answer"),
        ("ranged", "number", "range"),
        ("evaluated", "number", "equal to all"),
        ("moody", "number", "same input twice"),
        ("relative", "number", "other batch"),
        ("relative", "number", "other order"),
    ],
)
def test_a_planted_hole_is_found_by_its_probe(function: str, kind: str, probe: str) -> None:
    found = audited(function, kind)
    assert not found.passed
    assert probe in found.names("hole"), found.sentence()
    check = next(c for c in found.checks if c.name == probe)
    assert check.truth or probe.startswith(("same", "other order", "other batch"))  # an example


def test_a_sound_scorer_passes_without_a_finding() -> None:
    found = audited("sound")
    assert found.passed, found.sentence()
    assert found.names("hole") == found.names("warning") == []
    assert found.sentence().startswith("passed;")


BUILT_IN = [
    ("answer_match", "number", {}),
    ("answer_and_format", "number", {}),
    ("cosine_length", "number", {}),
    ("multiple_choice", "letter", {}),
    ("exact_match", "text", {}),
    ("exact_match", "text", {"after": "Answer:"}),
    ("normalised_match", "text", {}),
    ("think_format", "number", {}),
    ("regular_expression", "number", {"pattern": "Answer: (?P<answer>.*)"}),
    ("json_schema", "number", {"schema": {"type": "object", "required": ["steps"]}}),
    ("environment", "number", {}),
    ("math", "number", {}),
    ("math", "latex", {}),
    ("math", "latex", {"boxed_only": True}),
]


@pytest.mark.parametrize(("name", "kind", "options"), BUILT_IN)
def test_the_built_in_scorers_pass(name: str, kind: str, options: dict[str, Any]) -> None:
    config = RewardConfig(name=name, options=options, processes=2)
    made = rows(kind)
    entry = registered_reward(name)
    if entry is not None and entry.pooled:  # milliseconds a completion
        made = made.select(range(4))
    found = audit_scorer(config, made)
    holes = [check for check in found.checks if check.severity == "hole"]
    assert holes == []
    assert found.passed
    assert "second grader" not in found.names("warning")


def test_an_environment_s_reward_has_nothing_to_audit() -> None:
    found = audit_scorer(RewardConfig(name="environment"), rows("number"))
    assert found.sentence() == "nothing to audit, as the environment gives the reward"
    assert audit_line(found.record()) == found.sentence()
    rated = audit_scorer(RewardConfig(name="answer_match"), rows("number"))
    assert audit_line(rated.record()) == "passed"


def test_numbered_choices_are_answered_by_letters() -> None:
    made = probes.sample_rows("letter")
    for row in made:
        letter = str(row["reward_model"]["ground_truth"])  # type: ignore[index]
        row["reward_model"] = {"ground_truth": str("ABCD".index(letter))}
    found = audit_scorer(RewardConfig(name="multiple_choice"), audit.reward_rows(made))
    right = next(check for check in found.checks if check.name == "right answer")
    assert (right.severity, right.found) == ("ok", "credit on 16 of 16 rows, mean score 1")


def test_programs_get_the_probes_without_an_answer() -> None:
    made = rows()
    columns = {**made.columns, "ground_truth": ['{"inputs": ["1"], "outputs": ["2"]}'] * len(made)}
    config = RewardConfig(name=f"{HERE}:exits", isolation="none")
    found = audit_scorer(config, RewardRows(made.prompts, made.completions, columns))
    assert found.names("hole") == ["early exit"]
    assert "hedged list" not in {check.name for check in found.checks}


def test_each_source_is_probed_by_its_own_reward() -> None:
    numbers, letters = probes.sample_rows("number"), probes.sample_rows("letter")
    sources = {"letter": {"name": f"{HERE}:any_letter"}}
    settings = {"name": f"{HERE}:sound", "isolation": "none", "sources": sources}
    made = audit.reward_rows([*numbers, *letters])
    found = audit_scorer(RewardConfig.model_validate(settings), made)
    assert {check.source for check in found.checks if check.severity == "hole"} == {"letter"}
    assert found.rows == 2 * audit.ROWS


def test_part_of_the_reward_for_a_part_is_a_warning() -> None:
    found = audited("half_paid")
    assert found.passed
    assert "buried truth" in found.names("warning")


@pytest.mark.parametrize(("on_error", "severity"), [("drop", "warning"), ("fail", "hole")])
def test_a_failure_is_a_hole_where_it_ends_the_run(on_error: str, severity: Any) -> None:
    found = audited("fragile", on_error=on_error)
    assert found.names(severity) == ["nothing"]
    check = next(check for check in found.checks if check.name == "nothing")
    assert "no score: raised" in check.found


def test_a_scorer_that_fails_on_right_answers_does_not_pass() -> None:
    found = audited("sound", kind="number", options={})
    assert found.passed
    made = rows()
    config = RewardConfig(name="answer_match")
    columns = {**made.columns, "ground_truth": ["not a number"] * len(made)}
    failed = audit_scorer(config, RewardRows(made.prompts, made.completions, columns))
    assert "right answer" in failed.names("hole")


def test_a_form_of_your_own_is_probed() -> None:
    config = RewardConfig(name="regular_expression", options={"pattern": "Result=(?P<answer>.*)"})
    made = rows().select(range(2))
    unread = audit_scorer(config, made)
    assert "right answer" in unread.names("warning")
    read = audit_scorer(config, made, forms=["Result={}"])
    assert read.names("warning") == []


def test_what_has_no_time_left_is_a_hole() -> None:
    config = RewardConfig(name=f"{HERE}:sound", isolation="none")
    found = audit_scorer(config, rows(), deadline_s=0.0)
    assert found.names("hole") == ["right answer"]
    assert "the audit's own time is up" in found.checks[0].found
    assert not found.passed


def raises(prompts: Any, completions: Any, **columns: Any) -> Any:
    raise ValueError("no judge today")


def hangs(prompts: Any, completions: Any, **columns: Any) -> Any:
    time.sleep(3600)


def is_nan(prompts: Any, completions: Sequence[str], **columns: Any) -> Any:
    return [math.nan] * len(completions)


def applies_to_nothing(prompts: Any, completions: Sequence[str], **columns: Any) -> Any:
    return [None] * len(completions)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "raised 224 (reward 'raises' raised ValueError: no judge today)"),
        ("hangs", "deadline 32 (reward 'hangs' gave no answer for 1 completion within 0.1 s"),
        ("is_nan", "not_finite 224 (reward 'is_nan' returned nan for completion 0"),
        ("applies_to_nothing", "not_applicable 224 (reward 'applies_to_nothing' returned None"),
    ],
)
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_a_scorer_without_scores_is_a_hole_with_its_reason(
    function: str, reason: str, isolation: str
) -> None:
    begun = time.monotonic()
    limit_s = 0.1 if function == "hangs" else 30.0
    found = audited(function, isolation=isolation, timeout_s=limit_s)
    assert found.names("hole") == ["right answer"]
    assert f"no score: {reason}" in found.checks[0].found
    assert time.monotonic() - begun < 30


def hangs_on_blanks(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    if any(not text.strip() for text in completions):
        time.sleep(3600)
    return sound(prompts, completions, **columns)


def test_a_scorer_that_hangs_on_some_texts_is_probed_on_the_others() -> None:
    found = audited("hangs_on_blanks", timeout_s=0.1)
    assert "nothing" in found.names("warning")
    assert "time" in found.names("warning")
    assert found.names("hole") == []
    late = audited("hangs_on_blanks", timeout_s=0.1, on_error="fail")
    assert late.names("hole") == ["nothing"]


def test_a_truth_in_another_writing_is_no_hole() -> None:
    """ "18.0" begins "18.00" and is right, and so is "-0"."""
    made = rows()
    truths = ["0", "18.00", *(f"{n}.50" for n in range(14))]
    columns = {**made.columns, "ground_truth": truths}
    found = audit_scorer(RewardConfig(), RewardRows(made.prompts, made.completions, columns))
    assert found.names("hole") == []


def test_an_audit_survives_json() -> None:
    found = audited("contains")
    text = audit.to_json({"rl": found})
    assert audit.from_json(text.encode(), "x") == {"rl": found}
    assert json.loads(text)["rl"]["passed"] is False
    with pytest.raises(LineageError, match=r"folder/reward_audit.json is no reward audit"):
        audit.from_json(b"{}[]", "folder/reward_audit.json")


def test_an_audit_needs_rows() -> None:
    with pytest.raises(RewardError, match="there are no rows to audit a reward on"):
        audit_scorer(RewardConfig(), audit.reward_rows([]))
