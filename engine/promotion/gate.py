"""The gate: check the evidence, measure what the rules need, and move the alias if they pass.

The rules themselves are in `rules`; those of reward models are here. Both fail closed: what could
not be measured is not promoted.
"""

import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from engine.config import DataConfig, EvaluateConfig, GuardConfig, PromoteConfig
from engine.config.pipeline import RewardModelGateConfig
from engine.console import display_path, points, say
from engine.data.decontamination import words_of
from engine.data.rows import prompt_text
from engine.errors import ChampionChangedError, DataError, EngineError, LineageError
from engine.evaluation.comparability import incomparable
from engine.evaluation.metrics import Interval, mean_interval, paired_interval, ratio_interval
from engine.evaluation.policy_steps import read_policy_steps
from engine.evaluation.results import check_paired, prompt_digest, read_rows
from engine.evaluation.summary import ALL, TEST, read_problems, rows_of_set, set_names
from engine.lineage.audit import audit
from engine.lineage.lookup import review
from engine.promotion.champions import Champions, require_intact_copy
from engine.promotion.rules import Decision, Measurements, RuleOutcome, decision_of
from engine.storage.artifacts import SOURCE, Manifest, Parent, local_path, read_manifest, verify
from engine.storage.digests import sources_digest
from engine.tracking import Tracker
from engine.tracking.model_versions import ModelRegistry, ModelVersion

DATASETS = ("dataset", "pairs")  # kinds of artifacts with prompts that were trained on


def require_unmodified(
    references: Sequence[str], trusted: Collection[str] | None = None
) -> list[Path]:
    """Re-hash artifacts and all that they were made from; return the datasets among them.

    trusted: the public keys by which all must be signed, as in `lineage.audit`. Raises
    LineageError, but not for sources: a folder that data arrives in changes every day.
    """
    reviewed = review(references, descendants=False)
    nodes = reviewed.graph.nodes
    faults = [
        finding.text
        for finding in audit(reviewed, trusted).faults
        if finding.key not in nodes or nodes[finding.key].kind != SOURCE
    ]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise LineageError(
            f"what the promotion is based on is not as recorded: {faults[0]}{more}; nothing was "
            "moved; see `python -m engine.lineage verify`, then make the artifact again"
        )
    return [local_path(node.uri) for node in nodes.values() if node.kind in DATASETS]


def check_evidence(dataset: Path, policy: Path, evaluation: Path) -> Manifest:
    """Return an evaluation's manifest; LineageError unless it compared `policy` on `dataset`."""
    evidence = read_manifest(evaluation)
    if evidence.kind != "evaluation":
        raise LineageError(
            f"evaluation={display_path(evaluation)} is an artifact of kind {evidence.kind!r}; give "
            "the folder of an evaluation"
        )
    parents = {parent.name: parent.digest for parent in evidence.parents}
    for name, folder in (("dataset", dataset), ("policy", policy)):
        digest = read_manifest(folder).digest
        if parents.get(name) != digest:
            raise LineageError(
                f"the evaluation {display_path(evaluation)} is of {name} "
                f"{parents.get(name, 'unknown')[:12]}, and {name}={display_path(folder)} is "
                f"{digest[:12]}; give the artifacts of one run"
            )
    return evidence


STARTS = ("warm_start", "policy")  # parents from which RL, and which preferences, train a policy


def require_own_start(policy: Manifest, evaluation: Manifest) -> None:
    """Raise LineageError where an evaluation's baseline is not what the policy was trained from.

    With training in rounds any round's start counts; a policy that records none may have any.
    """
    starts: list[str] = []
    start = next((p for p in policy.parents if p.name in STARTS), None)
    while start is not None and start.digest not in starts:
        starts.append(start.digest)
        made_of = read_manifest(local_path(start.uri)).parents if start.kind == "preference" else ()
        start = next((p for p in made_of if p.name in STARTS), None)
    baseline = {p.name: p.digest for p in evaluation.parents}.get("warm_start", "nothing")
    if starts and baseline not in starts:
        raise LineageError(
            f"the evaluation {evaluation.digest[:12]} compares with {baseline[:12]}, and the "
            f"policy was trained from {starts[0][:12]}; evaluate it against that, or set "
            "promote.bootstrap=true, which asks for no gain"
        )


def trained_on(
    test: Sequence[str], training: Iterable[str], ngram: int, overlap: float
) -> list[bool]:
    """Tell of each test text (N of them) whether the training texts contain it.

    A text counts when one training text has the same words, without case and punctuation, or when
    at least `overlap` (0 to 1) of its distinct runs of `ngram` words occur in the training texts
    (Brown et al. 2020, arXiv:2005.14165, app. C). The training set may be of any size.
    """
    texts = [words_of(text) for text in test]
    runs = [_runs(text, ngram) for text in texts]
    test_runs, test_texts = set[tuple[str, ...]]().union(*runs), set(texts)
    seen: set[tuple[str, ...]] = set()
    same: set[tuple[str, ...]] = set()
    for text in map(words_of, training):
        same |= {text} & test_texts
        seen |= _runs(text, ngram) & test_runs
    return [
        text in same or (bool(ngrams) and len(ngrams & seen) >= overlap * len(ngrams))
        for text, ngrams in zip(texts, runs, strict=True)
    ]


def _runs(text: tuple[str, ...], ngram: int) -> set[tuple[str, ...]]:
    return {text[i : i + ngram] for i in range(len(text) - ngram + 1)}


TRAINING_SPLITS = ("sft_train", "train")
LAST_STEPS = 0.1  # share of RL's steps whose KL counts
KL_COLUMN = "actor/kl"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluation of the new model, which the champion's must match."""

    policy: Path  # folder of the new model
    dataset: Path  # folder with the evaluation sets
    rows: pd.DataFrame  # of the new model
    manifest: Manifest  # of its evaluation
    data: DataConfig
    evaluate: EvaluateConfig
    seed: int


def measure(
    new: Evaluated,
    before: pd.DataFrame,
    against: Literal["champion", "warm_start", "start_model"],
    dataset: str,
    datasets: Iterable[Path],
    rules: PromoteConfig,
    approved_by: str = "",
) -> Measurements:
    """Measure a new model against the rows `before` of another.

    dataset: the evaluation set that is measured; guards see the others, too. datasets: all dataset
    artifacts that the new model descends from. Raises DataError where the rows are not of the same
    problems, or have none of the set.
    """
    after, confidence = new.rows, new.evaluate.confidence
    check_paired(before, after)
    guards: dict[str, Interval | None] = {}
    for guard in rules.guards:
        old, scores = _guarded(before, guard), _guarded(after, guard)
        guards[guard.name] = paired_interval(old, scores, confidence) if len(scores) else None
    before, after = rows_of_set(before, dataset), rows_of_set(after, dataset)
    old, lengths = (rows["response_length"].to_numpy(float) for rows in (before, after))
    bounded = rules.max_length_ratio is not None
    right_before, right = (rows["greedy_correct"].to_numpy(float) for rows in (before, after))
    rule, training = rules.contamination, training_prompts(datasets)
    known = trained_on(list(after["prompt"]), training, rule.ngram, rule.overlap)
    return Measurements(
        against=against,
        problems=len(after.drop_duplicates(["prompt", "ground_truth"])),
        gain=paired_interval(right_before, right, confidence),
        score=mean_interval(right, confidence),
        guards=guards,
        kl=last_kl(new.policy) if rules.max_kl is not None else None,
        length_ratio=ratio_interval(old, lengths, confidence) if bounded else None,
        contamination=sum(known) / len(known),
        approved_by=approved_by,
    )


def judged_sets(new: Evaluated, dataset: str) -> list[str]:
    """The evaluation sets that decide, `dataset` or all; DataError where one is missing."""
    required = [TEST, *(extra.name for extra in new.data.evaluation_sets)]
    names = set_names(new.rows) if dataset == ALL else [dataset]
    for name in (*names, *(required if dataset == ALL else ())):
        rows_of_set(new.rows, name)
    return names


def last_kl(policy: Path) -> float | None:
    """Return mean KL of the last tenth of the steps that an RL model learned from, if known."""
    run = read_policy_steps(policy)
    if run is None or KL_COLUMN not in run.rows:
        return None
    kl = run.until_model[KL_COLUMN].to_numpy(float)
    last = kl[-max(1, math.ceil(LAST_STEPS * len(kl))) :]
    # Not nanmean: a step without a number makes the mean unknown.
    return float(last.mean()) if np.isfinite(last).all() else None


def _guarded(rows: pd.DataFrame, guard: GuardConfig) -> np.ndarray:
    for column in ("dataset", "data_source"):
        if chosen := getattr(guard, column):
            rows = rows[rows[column] == chosen]
    columns: Mapping[str, pd.Series] = {
        "pass_at_1": rows["greedy_correct"],
        "sampled": rows["samples_correct"] / rows["samples"],
        "majority": rows["majority_correct"],
        "format_rate": rows["format_rate"],
    }
    return columns[guard.metric].to_numpy(float)


def training_prompts(datasets: Iterable[Path]) -> Iterator[str]:
    """Yield the prompts of all splits that were trained on; DataError where there are none."""
    paths = [folder / f"{split}.parquet" for folder in datasets for split in TRAINING_SPLITS]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise DataError(
            f"no dataset that the model descends from has {' or '.join(TRAINING_SPLITS)}.parquet, "
            "so it is unknown whether it was trained on its test; give the run's dataset"
        )
    for path in paths:
        yield from map(prompt_text, pd.read_parquet(path, columns=["prompt"])["prompt"])


def champion_to_compare(
    tracker: Tracker, champions: Champions, request: str
) -> ModelVersion | None:
    """Return the present champion; for a retry that has moved the alias, the one before it."""
    move = champions.find(request)
    if move is None:
        return tracker.champion(champions.model_name, champions.alias)
    if move.replaced is None:
        return None
    return tracker.model_version(f"models:/{champions.model_name}/{move.replaced}")


def _recorded(
    champion: ModelVersion, new: Evaluated, trusted: Collection[str] | None
) -> tuple[pd.DataFrame, Parent]:
    """Read the champion's own evaluation; LineageError or StorageError where it can't be used."""
    uri = champion.tags.get("evaluation_uri", "")
    if not uri:
        raise LineageError("its version has no tag evaluation_uri")
    folder = local_path(uri)
    manifest = verify(folder)
    if manifest.own_digest != champion.tags.get("evaluation_manifest"):
        raise LineageError(f"{uri} is not the evaluation that its version's tags name")
    if fault := manifest.signature_fault(trusted):
        raise LineageError(fault)
    parents = {parent.name: parent.digest for parent in manifest.parents}
    if parents.get("policy") != champion.tags.get("artifact_digest"):
        raise LineageError(f"{uri} is of another model")
    if different := incomparable(manifest, new.manifest):
        raise LineageError(f"it differs from the new model's in {', '.join(different)}")
    rows = read_rows(folder, "rl")
    if prompt_digest(rows) != prompt_digest(new.rows):
        raise LineageError("it is of other problems")
    return rows, manifest.as_parent("champion_evaluation", uri)


def require_intact_champion(
    registry: ModelRegistry,
    champion: ModelVersion,
    alias: str,
    trusted: Collection[str] | None = None,
) -> None:
    """Raise LineageError where MLflow's copy of the champion is not what its tags name."""
    try:
        require_intact_copy(registry, champion, trusted)
    except LineageError as error:
        raise LineageError(
            f"the present {alias} can't be compared with: {error}; to put a whole version in its "
            f"place: python -m engine.promotion rollback --model {champion.name} --to VERSION "
            "--reason … (and --force for one that never was champion)"
        ) from error


def champion_evaluation(
    tracker: Tracker,
    champion: ModelVersion,
    alias: str,
    new: Evaluated,
    *,
    scratch: Path,
    trusted: Collection[str] | None = None,
) -> tuple[pd.DataFrame, Parent | None]:
    """Read the champion's recorded evaluation, or evaluate it now in the folder `scratch`.

    Returns its rows for the new model's problems, and the artifact that they were read from, if
    any. A recorded evaluation counts only when it is intact, signed by one of the public keys
    `trusted` (None: it need not be), of this champion and the same problems, and made as the new
    model's was. Raises LineageError for a champion that can't be compared with.
    """
    require_intact_champion(tracker, champion, alias, trusted)
    try:
        return _recorded(champion, new, trusted)
    except (EngineError, OSError) as error:
        say(f"promotion: the champion's recorded evaluation can't be used ({error})")
    if new.manifest.sources_digest != sources_digest():
        raise LineageError(
            f"the evaluation {new.manifest.digest[:12]} was made by other code "
            f"({new.manifest.code_version}) than would evaluate the champion now; nothing was "
            "moved; evaluate the model again with this code, then promote it"
        )
    say(f"promotion: evaluating the champion (version {champion.version}) on these problems")
    from engine.evaluation.scoring import evaluate_model  # torch takes seconds

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        model = tracker.download_model(champion, Path(folder) / "champion")
        rows = evaluate_model(
            model, read_problems(new.dataset), "champion", new.evaluate, seed=new.seed,
            max_response_length=new.data.max_response_length,
            max_prompt_length=new.data.max_prompt_length,
        )  # fmt: skip
    return rows, None


CONFIDENCE = 0.95


def decide_reward_model(
    right: np.ndarray, champion: np.ndarray | None, rules: RewardModelGateConfig
) -> Decision:
    """Decide by which of the same N held-out pairs were ranked right; on few pairs, don't promote.

    right: `[N]` bool, of the new reward model; champion: the present one's, if there is one.
    """
    pairs, least = len(right), rules.minimum_pairs
    if pairs < least:
        sentence = f"{pairs} pairs are held out, and promote.reward_model.minimum_pairs is {least}"
        return decision_of([RuleOutcome("pairs", False, pairs, least, sentence)])
    rate = mean_interval(right, CONFIDENCE)
    shown = f"{rate.mean:.1%} [{rate.low:.1%}, {rate.high:.1%}] of held-out pairs are ranked right"
    checks = [("accuracy", rate, rules.minimum_accuracy, shown, f"{rules.minimum_accuracy:.1%}")]
    if champion is not None:
        gain = paired_interval(champion, right, CONFIDENCE)
        shown = f"a gain over the champion of {points(gain, 2)} on the "
        bound = f"{100 * rules.minimum_gain:+.2f}"
        checks.append(("gain", gain, rules.minimum_gain, f"{shown}same pairs", bound))
    outcomes = []
    for rule, interval, minimum, shown, bound in checks:
        passed = interval.low > minimum
        sentence = f"{shown}; the lower end {'is' if passed else 'must be'} above {bound}"
        outcomes.append(RuleOutcome(rule, passed, list(interval), minimum, sentence))
    return decision_of(outcomes)


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

    Returns the decision with the champion that it was made against, if any. Where another promotion
    comes in between, it is decided again; ChampionChangedError after `DECISIONS`. A second call
    with the same `request` moves nothing; `notify` is told the outcome, a sentence.
    """
    name, alias = f"{version.name} version {version.version}", champions.alias
    digest = version.tags["artifact_digest"]
    for left in reversed(range(DECISIONS)):
        former = champion_to_compare(tracker, champions, request)
        if former is not None and former.tags.get("artifact_digest") == digest:
            if former.version != version.version:  # made by hand; its tags may be another's
                require_intact_champion(tracker, former, alias)
            reason = f"{name} is the {alias} already"
            notify(reason)
            return Decision(False, reason, ()), former
        decision = judge(former)
        if not decision.promote:
            break
        replaced = former.version if former else None
        who = {"request": request, "by": by, "approved_by": approved_by}
        try:
            champions.promote(version.version, replaced, decision.reason, **who)
            break
        except ChampionChangedError as error:
            if not left:
                raise
            notify(f"decided again: {error}")
    done = "is now" if decision.promote else "was not made"
    notify(f"{name} {done} {alias}: {decision.reason}")
    return decision, former
