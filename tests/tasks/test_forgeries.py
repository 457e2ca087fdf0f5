"""Ways to cheat the gate: nothing is promoted by any of them.

A way is a row of `FORGERIES`: a function that makes what is given to the gate, and the refusal.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from promotion_bench import EVALUATE, NAME, Bench, champion, digest, make_bench, rules, spoil
from safetensors.numpy import load_file, save_file

from engine.config import EvaluateConfig, LineageConfig, PromoteConfig
from engine.promotion import recheck
from engine.storage.artifacts import Draft, Manifest, publish, read_manifest, staging
from engine.storage.digests import MANIFEST, content_digest, hash_files
from engine.storage.signatures import KEYS_VARIABLE, SIGNING_VARIABLE, new_key
from engine.tracking import Tracker
from tasks.host import StageError

COIN = EvaluateConfig.model_validate(
    EVALUATE.model_dump() | {"reward": {"name": "coin_reward:coin"}}
)
# Its gain is not asked for, so that nothing but the forgery keeps a model out.
CHECKED = rules(bootstrap=True, recheck={"problems": 32})
SIGNED = LineageConfig(require_signatures=True)


@dataclass
class Attempt:
    """What is given to the gate."""

    bench: Bench
    model: Path
    evaluation: Path
    config: PromoteConfig = field(default_factory=rules)
    lineage: LineageConfig = field(default_factory=LineageConfig)


def made(bench: Bench, correct: int = 36, **changes: Any) -> Attempt:
    """A new model and an evaluation of our choice, which is promoted as it is."""
    model = bench.model(seed=2)
    return Attempt(bench, model, bench.evaluation(model, correct, **changes))


def answered(bench: Bench, forged: Callable[[pd.DataFrame, pd.DataFrame], None]) -> Attempt:
    """A new model and what both models do answer, forged."""
    bench = replace(bench, evaluate=COIN)
    model = bench.model(seed=2)
    return Attempt(bench, model, bench.honest(model, forged), CHECKED)


def digest_again(folder: Path, **changes: Any) -> None:
    """Write a manifest that agrees with the files of a folder; its other words stay."""
    words = json.loads((folder / MANIFEST).read_text()) | changes
    files = hash_files(folder)
    words["files"] = {name: entry.model_dump() for name, entry in files.items()}
    words["digest"] = content_digest(files)
    (folder / MANIFEST).write_text(Manifest.model_validate(words).model_dump_json(indent=2))


def five_problems(bench: Bench) -> Attempt:
    few = make_bench(seed=0, test_size=5)
    return replace(made(few, 5), config=rules(minimum_problems=100))


def one_problem_500_times(bench: Bench) -> Attempt:
    return made(bench, forged=lambda rows: rows.iloc[[0] * 500].reset_index(drop=True))


def one_problem_500_times_as_others(bench: Bench) -> Attempt:
    def repeated(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.iloc[[0] * 500].reset_index(drop=True).assign(index=range(500))

    return made(bench, forged=repeated)


def a_split_of_one_problem(bench: Bench) -> Attempt:
    other = make_bench(seed=0, forged=lambda test: test.iloc[[0] * 500].reset_index(drop=True))
    return replace(made(other, 400), config=rules(minimum_problems=100))


def other_problems(bench: Bench) -> Attempt:
    return made(bench, forged=lambda rows: rows.assign(prompt=rows["prompt"] + " "))


def the_easy_problems(bench: Bench) -> Attempt:
    return made(bench, forged=lambda rows: rows.head(36))


def other_truths(bench: Bench) -> Attempt:
    return made(bench, forged=lambda rows: rows.assign(ground_truth="7"))


def verdicts_edited(bench: Bench) -> Attempt:
    def forge(before: pd.DataFrame, after: pd.DataFrame) -> None:
        after["greedy_correct"] = True

    return answered(bench, forge)


def verdicts_and_answers_edited(bench: Bench) -> Attempt:
    def forge(before: pd.DataFrame, after: pd.DataFrame) -> None:
        after["greedy_correct"], after["greedy_completion"] = True, after["ground_truth"]

    return answered(bench, forge)


def one_verdict_edited(bench: Bench) -> Attempt:
    """Few changed answers may be rounding, but rounding changes the completion first."""

    def forge(before: pd.DataFrame, after: pd.DataFrame) -> None:
        after.loc[after.index[~after["greedy_correct"]][0], "greedy_correct"] = True

    config = rules(bootstrap=True, recheck={"problems": 40, "rounding": 0.1})
    return replace(answered(bench, forge), config=config)


def baseline_edited(bench: Bench) -> Attempt:
    def forge(before: pd.DataFrame, after: pd.DataFrame) -> None:
        before["greedy_correct"], before["greedy_completion"] = False, "I don't know"

    return answered(bench, forge)


def edited_and_digested_again(bench: Bench) -> Attempt:
    attempt = answered(bench, lambda before, after: None)
    spoil(attempt.evaluation)
    digest_again(attempt.evaluation)
    return attempt


def a_zeroed_model(bench: Bench) -> Attempt:
    with staging("rl") as folder:
        source = bench.model(seed=2)
        for path in source.iterdir():
            if path.name == "model.safetensors":
                weights = {name: np.zeros_like(w) for name, w in load_file(path).items()}
                save_file(weights, folder / path.name, {"format": "pt"})
            elif path.name != MANIFEST:
                (folder / path.name).write_bytes(path.read_bytes())
        model = publish(folder, Draft(kind="rl"))
    config = rules(bootstrap=True, recheck={"problems": 32})
    return Attempt(bench, model, bench.evaluation(model, 40), config)


def hand_alias_tags(bench: Bench) -> Attempt:
    """Version 1 is declined; a version by hand has its tags, another model, and the alias."""
    attempt = made(bench)
    assert not bench.promote(attempt.model, bench.evaluation(attempt.model, 0))["promoted"]
    client = Tracker().client
    tags = client.get_model_version(NAME, "1").tags
    hand = client.create_model_version(NAME, str(bench.model(seed=3)), tags=tags)
    client.set_registered_model_alias(NAME, "champion", hand.version)
    return attempt


def alias_by_hand(bench: Bench) -> Attempt:
    client = Tracker().client
    client.create_registered_model(NAME)
    client.create_model_version(NAME, str(bench.model(seed=3)))
    client.set_registered_model_alias(NAME, "champion", "1")
    return made(bench)


def unsigned(bench: Bench) -> Attempt:
    return replace(made(bench), lineage=SIGNED)


def signed_by(key: str, bench: Bench) -> Attempt:
    """A run whose artifacts are all signed by a key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGNING_VARIABLE, str(Path.cwd() / key))
        return replace(made(make_bench(seed=0)), lineage=SIGNED)


def signed_by_a_stranger(bench: Bench) -> Attempt:
    return signed_by("stranger.pem", bench)


def signed_then_edited(bench: Bench) -> Attempt:
    attempt = signed_by("ours.pem", bench)
    spoil(attempt.evaluation)
    digest_again(attempt.evaluation)
    return attempt


def signed_then_stripped(bench: Bench) -> Attempt:
    attempt = signed_by("ours.pem", bench)
    spoil(attempt.evaluation)
    digest_again(attempt.evaluation, signed=None)
    return attempt


def signed_with_an_unsigned_dataset(bench: Bench) -> Attempt:
    attempt = signed_by("ours.pem", bench)
    digest_again(attempt.bench.dataset, signed=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGNING_VARIABLE, str(Path.cwd() / "ours.pem"))
        model = attempt.bench.model(seed=4)
        return replace(attempt, model=model, evaluation=attempt.bench.evaluation(model, 36))


def a_flipped_byte(bench: Bench) -> Attempt:
    attempt = made(bench)
    path = attempt.model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return attempt


def truncated_rows(bench: Bench) -> Attempt:
    attempt = made(bench)
    path = attempt.evaluation / "rows_rl.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    return attempt


def a_foreign_file(bench: Bench) -> Attempt:
    attempt = made(bench)
    (attempt.evaluation / "notes.txt").write_text("all is well")
    return attempt


def another_dataset(bench: Bench) -> Attempt:
    attempt = made(bench)
    other = make_bench(seed=5)
    return replace(attempt, bench=replace(bench, dataset=other.dataset))


def no_numbers(bench: Bench) -> Attempt:
    attempt = made(bench)
    path = attempt.evaluation / "rows_rl.parquet"
    pd.read_parquet(path).assign(response_length=float("nan")).to_parquet(path, index=False)
    digest_again(attempt.evaluation)
    return replace(attempt, config=rules(max_length_ratio=2.0))


def verdicts_just_above_false(bench: Bench) -> Attempt:
    """The baseline's verdicts count as nothing, and are not false either."""
    attempt = answered(bench, lambda before, after: None)
    path = attempt.evaluation / "rows_warm_start.parquet"
    pd.read_parquet(path).assign(greedy_correct=1e-9).to_parquet(path, index=False)
    digest_again(attempt.evaluation)
    return attempt


def a_weak_baseline(bench: Bench) -> Attempt:
    """An honest comparison with a model that the new one was not trained from."""
    with staging("rl") as folder:
        shutil.copytree(bench.model(seed=2), folder, dirs_exist_ok=True)
        (folder / MANIFEST).unlink()
        start = read_manifest(bench.model(seed=3)).as_parent("warm_start", bench.model(seed=3))
        model = publish(folder, Draft(kind="rl", parents=(start,)))
    return Attempt(bench, model, bench.evaluation(model, 36))


def a_champion_tagged_with_a_bad_evaluation(bench: Bench) -> Attempt:
    """A champion's own evaluation is replaced by one in which it solves nothing."""
    first = answered(bench, lambda before, after: None)
    assert first.bench.promote(first.model, first.evaluation, first.config)["promoted"]

    def forge(before: pd.DataFrame, after: pd.DataFrame) -> None:
        after["greedy_correct"], after["greedy_completion"] = False, "I don't know"

    bad = first.bench.honest(first.model, forge)
    tags = {"evaluation_uri": str(bad), "evaluation_manifest": read_manifest(bad).own_digest}
    for key, value in tags.items():
        Tracker().client.set_model_version_tag(NAME, "1", key, value)
    model = first.bench.model(seed=3)
    return Attempt(first.bench, model, first.bench.honest(model), rules(recheck={"problems": 32}))


def registered_unsigned(bench: Bench) -> Attempt:
    """The model is a version of the registry already, with a manifest that nobody signed."""
    unsigned = made(bench)
    assert not bench.promote(unsigned.model, bench.evaluation(unsigned.model, 0))["promoted"]
    return signed_by("ours.pem", bench)


FORGERIES: dict[str, tuple[Callable[[Bench], Attempt], str]] = {
    "five problems": (five_problems, r"5 problems, but 100 are required"),
    "one problem 500 times": (one_problem_500_times, r"499 of a problem that is there already"),
    "one problem as 500": (one_problem_500_times_as_others, r"499 of other problems"),
    "a split of one problem": (a_split_of_one_problem, "1 problems, but 100 are required"),
    "other problems": (other_problems, r"40 of other problems"),
    "the easy problems": (the_easy_problems, r"4 problems without a row"),
    "other truths": (other_truths, r"of other problems"),
    "verdicts edited": (verdicts_edited, r"new model's favour, .* the same completion"),
    "one verdict edited": (one_verdict_edited, r", 1 differ in the new model's .*; 1 of the same"),
    "answers edited": (verdicts_and_answers_edited, r"new model's favour"),
    "baseline edited": (baseline_edited, r"in the new model's favour"),
    "digested again": (edited_and_digested_again, r"differ in the new .* same completion"),
    "a zeroed model": (a_zeroed_model, r"in the new model's favour"),
    "hand_alias_tags": (hand_alias_tags, r"champion can't be compared with: .* its tag"),
    "alias by hand": (alias_by_hand, r"version 1 has no tag artifact_digest"),
    "unsigned": (unsigned, r"is not signed; make it again with a key"),
    "signed by a stranger": (signed_by_a_stranger, r"the key \w+, which does not count here"),
    "signed, then edited": (signed_then_edited, r"is not as the key \w+ signed it"),
    "signed, then stripped": (signed_then_stripped, r"evaluation \w+ is not signed"),
    "an unsigned dataset": (signed_with_an_unsigned_dataset, r"dataset \w+ is not signed"),
    "a flipped byte": (a_flipped_byte, r"model.safetensors differs from the manifest"),
    "truncated rows": (truncated_rows, r"rows_rl.parquet differs from the manifest"),
    "a foreign file": (a_foreign_file, r"notes.txt is in the folder but not in the manifest"),
    "another dataset": (another_dataset, r"the evaluation .* is of dataset"),
    "no numbers": (no_numbers, r"'response_length' must be a finite number"),
    "just above false": (verdicts_just_above_false, r"'greedy_correct' must be true or false"),
    "a weak baseline": (a_weak_baseline, r"compares with \w+, and the policy was trained from"),
    "a tagged champion": (a_champion_tagged_with_a_bad_evaluation, "differ in the new model"),
    "registered unsigned": (registered_unsigned, r"version 1: rl \w+ is not signed"),
}


@pytest.fixture
def keys(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our key, which counts, and a stranger's."""
    for name in ("ours.pem", "stranger.pem"):
        Path(name).unlink(missing_ok=True)
    new_key(Path("stranger.pem"))
    monkeypatch.setenv(KEYS_VARIABLE, new_key(Path("ours.pem")))


def aliased() -> str | None:
    found = Tracker().champion(NAME)
    return found.version if found else None


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_forgery_promotes(forgery: str, bench: Bench) -> None:
    forge, message = FORGERIES[forgery]
    attempt = forge(bench)
    before = aliased()
    given = (attempt.model, attempt.evaluation, attempt.config)
    try:
        decision = attempt.bench.promote(*given, lineage=attempt.lineage)
    except StageError as error:
        outcome = str(error)
    else:
        assert not decision["promoted"]
        outcome = decision["reason"]
    assert aliased() == before
    assert re.search(message, " ".join(outcome.split())), outcome


def test_an_honest_evaluation_is_decoded_again_and_promoted(bench: Bench) -> None:
    attempt = answered(bench, lambda before, after: None)
    decision = attempt.bench.promote(attempt.model, attempt.evaluation, CHECKED)
    assert decision["promoted"]
    assert champion() == digest(attempt.model)
    record = json.loads((attempt.bench.folder / "evidence.json").read_text())["recheck"]
    assert record["verdicts"] == 64
    assert record["turned"] == 0
    assert len(set(record["problems"]["test"])) == 32
    assert f"(seed {record['seed']})" in decision["reason"]
    rows = pd.read_parquet(attempt.evaluation / "rows_rl.parquet")
    assert 5 < rows["greedy_correct"].sum() < 35, "else nothing was compared"


def test_an_honest_challenger_of_a_champion_is_decoded_again_with_it(bench: Bench) -> None:
    attempt = answered(bench, lambda before, after: None)
    assert attempt.bench.promote(attempt.model, attempt.evaluation, CHECKED)["promoted"]
    other = attempt.bench.model(seed=3)
    evidence = attempt.bench.honest(other)
    # Whatever it gains, but that it was compared with the champion.
    rows = pd.read_parquet(evidence / "rows_rl.parquet")["greedy_correct"].to_numpy()
    old = pd.read_parquet(attempt.evaluation / "rows_rl.parquet")["greedy_correct"].to_numpy()
    gain = rows.mean() - old.mean()
    decision = attempt.bench.promote(other, evidence, CHECKED)
    assert decision["gain"][0] == pytest.approx(gain)
    assert not decision["promoted"]

    def forge(before: pd.DataFrame, after: pd.DataFrame) -> None:
        after["greedy_correct"], after["greedy_completion"] = True, after["ground_truth"]

    forged = attempt.bench.promote(other, attempt.bench.honest(other, forge), CHECKED)
    assert not forged["promoted"]
    assert "of 64 verdicts that were checked by decoding again" in forged["reason"]
    assert champion() == digest(attempt.model)


def test_a_gate_without_a_gpu_promotes_no_large_model_unless_it_need_not_decode(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = answered(bench, lambda before, after: None)
    monkeypatch.setattr(recheck, "LARGEST_ON_CPU", 0)
    decision = attempt.bench.promote(attempt.model, attempt.evaluation, CHECKED)
    assert not decision["promoted"]
    assert "this machine has no GPU; promote on a profile with one" in decision["reason"]
    assert champion() is None
    off = rules(bootstrap=True)
    assert attempt.bench.promote(attempt.model, attempt.evaluation, off)["promoted"]


@pytest.mark.usefixtures("keys")
def test_a_signed_run_is_promoted_where_signatures_are_required(bench: Bench) -> None:
    attempt = signed_by("ours.pem", bench)
    given = (attempt.model, attempt.evaluation, attempt.config)
    assert attempt.bench.promote(*given, lineage=SIGNED)["promoted"]
    assert champion() == digest(attempt.model)
    # It is made again: what was there unsigned stays, and is not what the run is made of.
    assert read_manifest(bench.dataset).signed is None
    assert digest(bench.dataset) == digest(attempt.bench.dataset)
    assert bench.dataset != attempt.bench.dataset


@pytest.mark.usefixtures("keys")
def test_an_unsigned_champion_is_not_compared_with(bench: Bench) -> None:
    attempt = made(bench)
    assert bench.promote(attempt.model, attempt.evaluation)["promoted"]
    signed = signed_by("ours.pem", bench)
    model = signed.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SIGNING_VARIABLE, str(Path.cwd() / "ours.pem"))
        model = signed.bench.model(seed=4)
        evidence = signed.bench.evaluation(model, 40)
    with pytest.raises(StageError, match=r"can't be compared with: .* is not signed"):
        signed.bench.promote(model, evidence, lineage=SIGNED)
    assert champion() == digest(attempt.model)


def test_nobody_knows_before_which_problems_are_drawn() -> None:
    sizes = {"test": 1000, "hard": 5}
    draws = [recheck.draw(sizes, 32) for _ in range(3)]
    assert len({seed for seed, _ in draws}) == 3
    assert len({tuple(picks["test"]) for _, picks in draws}) == 3
    for _, picks in draws:
        assert len(set(picks["test"])) == 32
        assert picks["hard"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("verdicts", "rounding", "most"),
    [(64, 0.001, 1), (64, 0.02, 4), (32, 0.001, 1), (64, 0.0, 0), (1000, 0.001, 4), (1, 0.5, 1)],
)
def test_what_rounding_explains(verdicts: int, rounding: float, most: int) -> None:
    assert recheck.explained(verdicts, rounding) == most
    generator = np.random.default_rng(0)
    turned = generator.binomial(verdicts, rounding, 20_000)
    assert (turned > most).mean() < recheck.SIGNIFICANCE + 0.003
    assert most == 0 or (turned > most - 1).mean() >= recheck.SIGNIFICANCE - 0.003
