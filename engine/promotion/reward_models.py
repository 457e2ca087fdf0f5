"""The rules by which a reward model becomes the champion among reward models.

They fail closed, as those of `rules`: without held-out pairs nothing is promoted.
"""

from __future__ import annotations

import numpy as np

from engine.config.promotion import RewardModelGateConfig
from engine.console import points
from engine.evaluation.metrics import Interval, paired_bootstrap, wilson_interval
from engine.promotion.rules import Decision, RuleOutcome, decision_of

CONFIDENCE, SAMPLES = 0.95, 10_000
LEAST_PAIRS = 2  # one has no spread to resample


def decide_reward_model(
    right: np.ndarray, champion: np.ndarray | None, rules: RewardModelGateConfig, seed: int
) -> Decision:
    """Decide by which of the same N held-out pairs were ranked right.

    right: `[N]` bool, of the new reward model; champion: the present one's, None where there is
    none.
    """
    if len(right) < LEAST_PAIRS:
        sentence = f"{len(right)} pairs are held out, and the rules need {LEAST_PAIRS} at least"
        return decision_of([RuleOutcome("accuracy", False, None, rules.minimum_accuracy, sentence)])
    outcomes = [_accuracy(wilson_interval(right, CONFIDENCE), rules.minimum_accuracy)]
    if champion is not None:
        before, after = champion.astype(float), right.astype(float)
        gain = paired_bootstrap(before, after, CONFIDENCE, SAMPLES, seed)
        outcomes.append(_gain(gain, rules.minimum_gain))
    return decision_of(outcomes)


def _accuracy(found: Interval, minimum: float) -> RuleOutcome:
    passed = found.low > minimum
    sentence = (
        f"{found.mean:.1%} [{found.low:.1%}, {found.high:.1%}] of held-out pairs are ranked right; "
        f"the lower end {'is' if passed else 'must be'} above {minimum:.1%}"
    )
    return RuleOutcome("accuracy", passed, [found.mean, found.low, found.high], minimum, sentence)


def _gain(found: Interval, minimum: float) -> RuleOutcome:
    passed = found.low > minimum
    sentence = (
        f"a gain over the champion of {points(found.mean, found.low, found.high, 2)} on the same "
        f"pairs; the lower end {'is' if passed else 'must be'} above {100 * minimum:+.2f}"
    )
    return RuleOutcome("gain", passed, [found.mean, found.low, found.high], minimum, sentence)
