"""The gate: measure what the rules need, judge a version, and move the alias if it passes.

The rules themselves are in `rules`; those of reward models are here.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from engine.config import DataConfig, EvaluateConfig, GuardConfig, PromoteConfig
from engine.config.pipeline import RewardModelGateConfig
from engine.console import points
from engine.data.rows import prompt_text
from engine.errors import ChampionChangedError, DataError, EngineError, LineageError
from engine.evaluation.comparability import incomparable
from engine.evaluation.metrics import Interval, paired_bootstrap, wilson_interval
from engine.evaluation.policy_steps import read_policy_steps
from engine.evaluation.results import check_paired, prompt_digest
from engine.evaluation.summary import ALL, read_problems, rows_of_set, set_names
from engine.promotion.champions import Champions, require_intact_copy
from engine.promotion.rules import Decision, Measurements, RuleOutcome, decision_of
from engine.storage.artifacts import Manifest, Parent, local_path, verify
from engine.storage.digests import sources_digest

if TYPE_CHECKING:
    from engine.tracking import Tracker
    from engine.tracking.model_versions import ModelVersion


# Which test prompts were trained on: the same words, or most of their runs of n words.
#
# Texts are compared as words without case and punctuation. The n-grams kept in memory are those of
# the test set, so the training set may be of any size.

_WORD = re.compile(r"\w+")


def trained_on(
    test: Sequence[str], training: Iterable[str], ngram: int, overlap: float
) -> list[bool]:
    """Tell of each test text (N of them) whether the training texts contain it.

    A text counts when one training text has the same words, or when at least `overlap` (0 to 1) of
    its distinct runs of `ngram` words occur in the training texts (Brown et al. 2020,
    arXiv:2005.14165, app. C). A text of fewer words has none and counts by its whole alone.
    """
    texts = [words(text) for text in test]
    runs = [set(_runs(text, ngram)) for text in texts]
    wanted = set().union(*runs) if runs else set()
    whole = set(texts)
    seen: set[tuple[str, ...]] = set()
    same: set[tuple[str, ...]] = set()
    for line in training:
        text = words(line)
        if text in whole:
            same.add(text)
        seen.update(run for run in _runs(text, ngram) if run in wanted)
    return [
        text in same or (bool(own) and len(own & seen) >= overlap * len(own))
        for text, own in zip(texts, runs, strict=True)
    ]


def share_trained_on(
    test: Sequence[str], training: Iterable[str], ngram: int, overlap: float
) -> float:
    """Return the share (0 to 1) of test texts that the training texts contain; see `trained_on`."""
    if not test:
        raise DataError("there are no test prompts to look for in the training data")
    return sum(trained_on(test, training, ngram, overlap)) / len(test)


def words(text: str) -> tuple[str, ...]:
    """Return a text's words without case and punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def _runs(text: tuple[str, ...], ngram: int) -> Iterable[tuple[str, ...]]:
    return (text[i : i + ngram] for i in range(len(text) - ngram + 1))


# What the rules need: measured on evaluation rows, RL's metrics and the training data.

TRAINING_SPLITS = ("sft_train", "train")
LAST_STEPS = 0.1  # share of RL's steps whose KL counts
KL_COLUMN = "actor/kl"


def measure(
    before: pd.DataFrame,
    after: pd.DataFrame,
    against: Literal["champion", "warm_start", "start_model"],
    *,
    dataset: str,
    policy: Path,
    datasets: Iterable[Path],
    rules: PromoteConfig,
    evaluate: EvaluateConfig,
    seed: int,
    approved_by: str = "",
) -> Measurements:
    """Measure a new model (`after`) against another (`before`), rows as of `evaluation.rows`.

    dataset: the evaluation set that is measured; guards see the others, too. policy: the new
    model's artifact. datasets: all dataset artifacts that it descends from. Raises DataError where
    the rows are not of the same problems, or have none of the set.
    """
    check_paired(before, after)

    def change(old: np.ndarray, new: np.ndarray) -> Interval:
        return paired_bootstrap(old, new, evaluate.confidence, evaluate.bootstrap_samples, seed)

    guards: dict[str, Interval | None] = {}
    for guard in rules.guards:
        was, is_now = _guarded(before, guard), _guarded(after, guard)
        # One problem has no spread, so its interval would claim certainty.
        guards[guard.name] = change(was, is_now) if len(is_now) > 1 else None
    before, after = rows_of_set(before, dataset), rows_of_set(after, dataset)
    ratio = None
    if rules.max_length_ratio is not None:
        ratio = length_ratio(
            before["response_length"].to_numpy(float),
            after["response_length"].to_numpy(float),
            evaluate.confidence,
            evaluate.bootstrap_samples,
            seed,
        )
    old, new = (rows["greedy_correct"].to_numpy(float) for rows in (before, after))
    return Measurements(
        against=against,
        gain=change(old, new),
        score=wilson_interval(new, evaluate.confidence),
        guards=guards,
        kl=last_kl(policy) if rules.max_kl is not None else None,
        length_ratio=ratio,
        contamination=share_trained_on(
            list(after["prompt"]),
            _training_prompts(datasets),
            rules.contamination.ngram,
            rules.contamination.overlap,
        ),
        approved_by=approved_by,
    )


def judged_sets(rows: pd.DataFrame, dataset: str, wanted: Sequence[str]) -> list[str]:
    """The evaluation sets that decide: the one named `dataset`, or with `all` every one.

    Raises DataError where that one is missing in the rows, or with `all` one of `wanted`.
    """
    names = set_names(rows) if dataset == ALL else [dataset]
    for name in (*names, *(wanted if dataset == ALL else ())):
        rows_of_set(rows, name)
    return names


def length_ratio(
    before: np.ndarray, after: np.ndarray, confidence: float, samples: int, seed: int
) -> Interval | None:
    """Mean of `after` over mean of `before`, `[N]` tokens each, with its bootstrap interval.

    Problems are resampled in pairs. None when a resample of `before` has no tokens at all.
    """
    picks = np.random.default_rng(seed)
    ratios = np.empty(samples)
    for i in range(samples):
        drawn = picks.integers(0, len(before), len(before))
        below = before[drawn].mean()
        if not below > 0:
            return None
        ratios[i] = after[drawn].mean() / below
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(float(after.mean() / before.mean()), float(low), float(high))


def last_kl(policy: Path) -> float | None:
    """Mean KL of the last tenth of the steps that an RL model learned from (at least one).

    None where it is not known.
    """
    run = read_policy_steps(policy)
    if run is None or KL_COLUMN not in run.rows:
        return None
    steps = run.until_model
    last = steps[KL_COLUMN].to_numpy(float)[-max(1, math.ceil(LAST_STEPS * len(steps))) :]
    # Not nanmean: of a step without a number nothing is known.
    return float(last.mean()) if np.isfinite(last).all() else None


def _guarded(rows: pd.DataFrame, guard: GuardConfig) -> np.ndarray:
    """Return a guard's score of each of its problems, in the rows' order."""
    if guard.dataset:
        rows = rows[rows["dataset"] == guard.dataset]
    if guard.data_source:
        rows = rows[rows["data_source"] == guard.data_source]
    columns: Mapping[str, pd.Series] = {
        "pass_at_1": rows["greedy_correct"],
        "sampled": rows["samples_correct"] / rows["samples"],
        "majority": rows["majority_correct"],
        "format_rate": rows["format_rate"],
    }
    return columns[guard.metric].to_numpy(float)


def _training_prompts(datasets: Iterable[Path]) -> Iterable[str]:
    """Yield the prompts of all splits that were trained on; DataError where there are none."""
    found = False
    for folder in datasets:
        for split in TRAINING_SPLITS:
            path = folder / f"{split}.parquet"
            if path.is_file():
                found = True
                yield from map(prompt_text, pd.read_parquet(path, columns=["prompt"])["prompt"])
    if not found:
        raise DataError(
            f"no dataset that the model descends from has {' or '.join(TRAINING_SPLITS)}.parquet, "
            "so it is unknown whether it was trained on its test; give the run's dataset"
        )


# The champion's evaluation on the new model's problems: as recorded, or made now.


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluation of the new model, which the champion's must match."""

    dataset: Path  # folder with the evaluation sets
    rows: pd.DataFrame  # of the new model
    manifest: Manifest  # of its evaluation
    data: DataConfig
    evaluate: EvaluateConfig
    seed: int


@dataclass(frozen=True, slots=True)
class ChampionEvaluation:
    """The champion's rows for the same problems."""

    rows: pd.DataFrame
    recorded: Parent | None  # the evaluation artifact that they were read from; None: made now


def champion_to_compare(
    tracker: Tracker, champions: Champions, request: str
) -> ModelVersion | None:
    """The present champion; for a retry that has already moved the alias, the one before it."""
    move = champions.find(request)
    if move is None:
        return tracker.champion(champions.model_name, champions.alias)
    if move.replaced is None:
        return None
    return tracker.model_version(f"models:/{champions.model_name}/{move.replaced}")


def champion_evaluation(
    tracker: Tracker,
    champion: ModelVersion,
    alias: str,
    new: Evaluated,
    *,
    scratch: Path,
    notify: Callable[[str], None],
) -> ChampionEvaluation:
    """Read the champion's recorded evaluation, or evaluate it now in the folder `scratch`.

    A recorded evaluation counts only when its artifact is intact, is the recorded one, is of this
    champion, has the same problems, and was made as the new model's was. MLflow's copy of the
    champion must match its tags in both cases, and what is evaluated now needs an evaluation of
    the new model by this code; LineageError otherwise.
    """
    try:
        require_intact_copy(tracker, champion)
    except LineageError as error:
        raise LineageError(
            f"the present {alias} can't be compared with: {error}; to put a whole version in its "
            f"place: python -m engine.promotion rollback --model {champion.name} --to VERSION "
            "--reason … (and --force for one that never was champion)"
        ) from error
    try:
        return _recorded(champion, new)
    except (EngineError, OSError) as error:
        notify(f"the champion's recorded evaluation can't be used ({error})")
    if new.manifest.sources_digest != sources_digest():
        raise LineageError(
            f"the evaluation {new.manifest.digest[:12]} was made by other code "
            f"({new.manifest.code_version}) than would evaluate the champion now; nothing was "
            "moved; evaluate the model again with this code, then promote it"
        )
    notify(f"evaluating the champion (version {champion.version}) on these problems")
    from engine.evaluation.scoring import evaluate_model  # torch takes seconds

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        model = tracker.download_model(champion.name, champion.version, Path(folder) / "champion")
        rows = evaluate_model(
            model,
            read_problems(new.dataset),
            "champion",
            new.evaluate,
            max_response_length=new.data.max_response_length,
            max_prompt_length=new.data.max_prompt_length,
            seed=new.seed,
        )
    return ChampionEvaluation(rows, None)


def _recorded(champion: ModelVersion, new: Evaluated) -> ChampionEvaluation:
    """The champion's own evaluation.

    Raises LineageError or StorageError when there is none, it is gone, not what was recorded, of
    other problems, or made in another way.
    """
    uri = champion.tags.get("evaluation_uri", "")
    if not uri:
        raise LineageError("its version has no tag evaluation_uri")
    folder = local_path(uri)
    manifest = verify(folder)
    if manifest.own_digest != champion.tags.get("evaluation_manifest"):
        raise LineageError(f"{uri} is not the evaluation that its version's tags name")
    of = {parent.name: parent.digest for parent in manifest.parents}
    if of.get("policy") != champion.tags.get("artifact_digest"):
        raise LineageError(f"{uri} is of another model")
    if different := incomparable(manifest, new.manifest):
        raise LineageError(f"it differs from the new model's in {', '.join(different)}")
    rows = pd.read_parquet(folder / "rows_rl.parquet")
    if prompt_digest(rows) != prompt_digest(new.rows):
        raise LineageError("it is of other problems")
    return ChampionEvaluation(rows, manifest.as_parent("champion_evaluation", uri))


# The rules by which a reward model becomes the champion among reward models.
#
# They fail closed, as those of `rules`: without held-out pairs nothing is promoted.

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


# The gate: judge a version against the present champion, and move the alias where it passes.

DECISIONS = 5  # of one promotion, while others promote in between


def decide_and_move(
    tracker: Tracker,
    champions: Champions,
    version: ModelVersion,
    judge: Callable[[ModelVersion | None], Decision],
    *,
    request: str,
    by: str,
    approved_by: str = "",
    notify: Callable[[str], None],
) -> tuple[Decision, ModelVersion | None]:
    """Decide on `version`, and move the alias if the decision is to promote.

    Returns the decision with the champion that it was made against (None: there was none). Where
    another promotion comes in between, it is decided again, against the new champion.

    judge: compares the version with a champion; called once a decision.
    request: what makes a second call with it the same request, which moves nothing.
    notify: is told the outcome, a sentence.
    Raises ChampionChangedError when others promoted during each of `DECISIONS` decisions.
    """
    name, alias = f"{version.name} version {version.version}", champions.alias
    digest = version.tags["artifact_digest"]
    for left in reversed(range(DECISIONS)):
        former = champion_to_compare(tracker, champions, request)
        if former is not None and former.tags.get("artifact_digest") == digest:
            reason = f"{name} is the {alias} already"
            notify(reason)
            return Decision(False, reason, ()), former
        decision = judge(former)
        if not decision.promote:
            break
        try:
            champions.promote(
                version.version,
                former.version if former else None,
                decision.reason,
                request=request,
                by=by,
                approved_by=approved_by,
            )
            break
        except ChampionChangedError as error:
            if not left:
                raise
            notify(f"decided again: {error}")
    done = "is now" if decision.promote else "was not made"
    notify(f"{name} {done} {alias}: {decision.reason}")
    return decision, former
