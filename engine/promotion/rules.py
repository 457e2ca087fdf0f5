"""The rules of promotion, as one pure function from measurements to a decision.

It fails closed: a measurement that is missing or no number fails its rule. Measuring is in `gate`,
moving the alias in `champions`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from engine.config import PromoteConfig
from engine.console import points
from engine.evaluation.metrics import Interval
from engine.evaluation.summary import TEST

APPROVAL = "approval"
_OF_A_SET = ("problems", "gain", "score", "length", "contamination")  # rules on one set's problems
Measured = float | str | list[float] | None


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of a new model against another on one set; None: could not be measured."""

    against: Literal["champion", "warm_start", "start_model"]  # what it was compared with
    problems: int | None  # of the set
    gain: Interval | None  # of greedy pass@1, a fraction, e.g. Interval(0.1, 0.05, 0.15)
    score: Interval | None = None  # the new model's greedy pass@1, e.g. Interval(0.5, 0.4, 0.6)
    guards: Mapping[str, Interval | None] = field(default_factory=dict)  # change by guard's name
    kl: float | None = None  # nats a token, to the reference, e.g. 0.02
    length_ratio: Interval | None = None  # mean response length, new over old
    contamination: float | None = None  # share of test prompts that were trained on
    approved_by: str = ""  # who agreed; empty: nobody yet


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    rule: str  # e.g. "gain", "guard pass_at_1 of gsm8k", "kl"
    passed: bool
    value: Measured  # what was measured: a number, an interval's three, a name, or None
    bound: Measured  # the limit
    sentence: str  # with its numbers


@dataclass(frozen=True, slots=True)
class Decision:
    promote: bool
    reason: str  # one sentence or two
    outcomes: tuple[RuleOutcome, ...]

    @property
    def waits_for_approval(self) -> bool:
        """Tell whether a person's consent is all that is missing."""
        return [o.rule for o in self.outcomes if not o.passed] == [APPROVAL]

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "waits_for_approval": self.waits_for_approval}


def decide_on_sets(sets: Mapping[str, Measurements], rules: PromoteConfig) -> Decision:
    """Check every evaluation set that decides; all, and at least one, must pass.

    Rules on a set's own problems are checked for each set, the others once.
    """
    outcomes: list[RuleOutcome] = []
    for name, measurements in sets.items():
        for outcome in _outcomes(measurements, rules):
            if outcome.rule in _OF_A_SET and list(sets) != [TEST]:
                rule, sentence = f"{outcome.rule} on {name}", f"{name}: {outcome.sentence}"
                outcome = replace(outcome, rule=rule, sentence=sentence)
            if outcome not in outcomes:
                outcomes.append(outcome)
    if not sets:
        return Decision(False, "Not promoted: no evaluation set was measured.", ())
    return decision_of(outcomes)


def decision_of(results: Iterable[RuleOutcome]) -> Decision:
    """Promote if every rule passed; the reason says which did not, else what all results."""
    outcomes = tuple(results)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    reasons = "; ".join(outcome.sentence for outcome in failed or outcomes)
    return Decision(not failed, f"{'Not promoted' if failed else 'Promoted'}: {reasons}.", outcomes)


def _outcomes(measurements: Measurements, rules: PromoteConfig) -> Iterator[RuleOutcome]:
    problems, fewest = measurements.problems, rules.minimum_problems
    if problems is None or not _is_finite(problems):
        yield _unreadable("problems", problems, fewest, "the number of problems")
    else:
        passed = problems >= fewest
        text = f"{problems} problems {'are' if passed else 'must be'} at least the required"
        yield RuleOutcome("problems", passed, problems, fewest, f"{text} {fewest}")
    yield _gain(measurements, rules)
    if rules.minimum_score is not None:
        score, least = measurements.score, rules.minimum_score
        if score is None or not _in_range(score, 0, 1):
            yield _unreadable("score", score, least, "pass@1")
        else:
            passed = score.low >= least
            yield RuleOutcome(
                "score", passed, list(score), least,
                f"pass@1 is {score.mean:.2%} [{score.low:.2%}, {score.high:.2%}]; its lower end "
                f"{_must_be(passed)} at or above the required {least:.2%}",
            )  # fmt: skip
    for guard in rules.guards:
        rule, change = f"guard {guard.name}", measurements.guards.get(guard.name)
        if change is None or not _in_range(change, -1, 1):
            yield _unreadable(rule, change, -guard.tolerance, f"the change in {guard.name}")
        else:
            passed = change.low >= -guard.tolerance
            yield RuleOutcome(
                rule, passed, list(change), -guard.tolerance,
                f"{guard.name} changes by {points(change, 2)}; its "
                f"lower end {_must_be(passed)} at or above {_points(-guard.tolerance)}",
            )  # fmt: skip
    if rules.max_kl is not None:
        kl, limit = measurements.kl, rules.max_kl
        if kl is None or not _is_finite(kl):
            yield _unreadable("kl", kl, limit, "the KL to the reference")
        else:
            text = f"KL to the reference {kl:.4g} {_bound(kl <= limit)} {limit:.4g}"
            yield RuleOutcome("kl", kl <= limit, kl, limit, text)
    if rules.max_length_ratio is not None:
        ratio, limit = measurements.length_ratio, rules.max_length_ratio
        if ratio is None or not _in_range(ratio, 0, math.inf):
            yield _unreadable("length", ratio, limit, "the ratio of response lengths")
        else:
            passed = ratio.high <= limit
            yield RuleOutcome(
                "length", passed, list(ratio), limit,
                f"responses are {ratio.mean:.3g} [{ratio.low:.3g}, {ratio.high:.3g}] times as "
                f"long; the upper end {_bound(passed)} {limit:.3g}",
            )  # fmt: skip
    share, limit = measurements.contamination, rules.contamination.max_share
    if share is None or not _is_finite(share) or not 0 <= share <= 1:
        yield _unreadable("contamination", share, limit, "the share of test prompts trained on")
    else:
        text = f"{share:.2%} of the test prompts were trained on, {_bound(share <= limit)}"
        yield RuleOutcome("contamination", share <= limit, share, limit, f"{text} {limit:.2%}")
    if rules.approval == "required":
        by = measurements.approved_by.strip()
        text = f"approved by {by}" if by else "it waits for a person's approval"
        yield RuleOutcome(APPROVAL, bool(by), by or None, "required", text)


def _gain(measurements: Measurements, rules: PromoteConfig) -> RuleOutcome:
    """Hold the interval's lower end to the minimum, unless `bootstrap` lets a first model in."""
    gain, minimum = measurements.gain, rules.minimum_gain
    if gain is None or not _in_range(gain, -1, 1):
        return _unreadable("gain", gain, minimum, "the gain in pass@1")
    over = measurements.against.replace("_", " ")
    shown = f"pass@1 gain {points(gain, 2)} over the {over}"
    if measurements.against != "champion" and rules.bootstrap:
        sentence = f"{shown}, of which promote.bootstrap asks nothing for the first champion"
        return RuleOutcome("gain", True, list(gain), None, sentence)
    passed = gain.low > minimum
    shown += ", its lower end above" if passed else "; its lower end must be above"
    sentence = f"{shown} the required gain of {_points(minimum)} percentage points"
    return RuleOutcome("gain", passed, list(gain), minimum, sentence)


def with_reward_audit(
    decision: Decision, evaluation: Mapping[str, object], rules: PromoteConfig
) -> Decision:
    """Ask, where the rules do, that the scorers passed the audit that an evaluation records.

    evaluation: its manifest's configuration. One of the scorers must be the one that judged.
    """
    if not rules.require_reward_audit or not decision.outcomes:
        return decision
    recorded, scorer = evaluation.get("reward_audit"), evaluation.get("scorer")
    entries = recorded if isinstance(recorded, list) else []
    audits = [entry if isinstance(entry, Mapping) else {} for entry in entries]
    failed = [audit for audit in audits if audit.get("passed") is not True]
    value, sentence = "passed", "the scorers passed the reward audit"
    if not scorer or scorer not in [audit.get("scorer") for audit in audits]:
        value = "missing"
        sentence = "the evaluation records no reward audit of its scorer; evaluate again with one"
    elif failed:
        value, holes = "failed", [str(hole) for audit in failed for hole in audit.get("holes", ())]
        sentence = f"a scorer failed the reward audit ({', '.join(holes)}); correct it, train again"
    outcome = RuleOutcome("reward audit", value == "passed", value, "passed", sentence)
    return decision_of([*decision.outcomes, outcome])


def _unreadable(rule: str, value: object, bound: Measured, what: str) -> RuleOutcome:
    shown = "was not measured" if value is None else f"is {value!r}, which can't be"
    return RuleOutcome(rule, False, None, bound, f"{what} {shown}; evaluate again")


def _in_range(interval: Interval, low: float, high: float) -> bool:
    numbers = [low, interval.low, interval.mean, interval.high, high]
    return all(map(_is_finite, interval)) and numbers == sorted(numbers)


def _must_be(passed: bool) -> str:
    return "is" if passed else "must be"


def _bound(passed: bool) -> str:
    return "within the bound of" if passed else "must be at most"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _points(fraction: float) -> str:
    return f"{100 * fraction + 0.0:+.2f}"  # + 0.0 turns a negative zero into a plain one
