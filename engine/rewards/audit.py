"""The reward audit: whether a scorer can be fooled, by the battery of `probes` on rows of data.

Right and wrong answers in all usual forms come first. A probe is credited on a row where the scorer
calls it right, or where it earns half or more of what a right answer earns over a wrong one. Credit
without a right answer is a hole, and a hole fails the audit.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import psutil
from pydantic import TypeAdapter, ValidationError

from engine.config import RewardConfig
from engine.errors import LineageError, RewardError
from engine.rewards import probes
from engine.rewards.answers import ENVIRONMENT
from engine.rewards.calls import RewardRows, score_rows
from engine.rewards.probes import Case, Probe
from engine.rewards.reward_function import registered_reward
from engine.rewards.scorer import SOURCE, Scorer, scorer_identity

Severity = Literal["ok", "note", "warning", "hole"]
_ORDER: tuple[Severity, ...] = ("ok", "note", "warning", "hole")
ROWS = 16  # of a source that are probed
_FORMS = 2  # that are probed, of those in which right answers earn most
_CREDIT, _PART = 0.5, 0.1  # shares of what a right answer earns over a wrong one
_RARELY, _BY_CHANCE = 0.05, 0.15  # shares of rows on which credit is no hole
_ROUNDING = 1e-4  # of the scores' spread
_MEMORY_MIB = 1024.0
_SHOWN = 300  # characters of an example


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a probe on the rows of one source, or of another check on all rows."""

    name: str  # e.g. "hedged list"
    source: str  # the rows' data_source; empty: all rows
    meaning: str
    expected: str  # e.g. "no credit"
    found: str = ""  # e.g. "credit on 12 of 16 rows, mean score 0.75"
    severity: Severity = "ok"
    score: float | None = None  # mean of the probe's completion that did worst
    completion: str = ""  # an example of what is not as expected; a long one is cut
    truth: str = ""  # its right answer


@dataclass(frozen=True, slots=True)
class RewardAudit:
    """All that was found about one scorer; `passed` where no check found a hole."""

    scorer: str  # as in an evaluation's manifest, see `scorer_identity`
    passed: bool
    rows: int  # of data that were probed
    completions: int  # that were scored
    seconds: float  # of all calls
    memory_mib: float  # by which this process and its children grew
    checks: tuple[Check, ...]

    def names(self, severity: Severity) -> list[str]:
        """The names of the checks of a severity, each once."""
        return list(dict.fromkeys(c.name for c in self.checks if c.severity == severity))

    def record(self) -> dict[str, object]:
        """What an evaluation's manifest records."""
        found = {"holes": self.names("hole"), "warnings": self.names("warning")}
        return {"scorer": self.scorer, "passed": self.passed, **found}

    def sentence(self) -> str:
        """E.g. `failed, holes: hedged list, chain; 32 checks on 16 rows`."""
        found = {"holes": self.names("hole"), "warnings": self.names("warning")}
        parts = [f"{kind}: {', '.join(names)}" for kind, names in found.items() if names]
        outcome = ", ".join(["passed" if self.passed else "failed", *parts])
        return f"{outcome}; {len(self.checks)} checks on {self.rows} rows"


def to_json(audits: Mapping[str, RewardAudit]) -> str:
    """Strict JSON of audits by who scores, e.g. `rl`."""
    values = {name: asdict(audit) for name, audit in audits.items()}
    return json.dumps(values, indent=2, allow_nan=False)


def from_json(text: bytes, where: str) -> dict[str, RewardAudit]:
    """Read what `to_json` wrote; LineageError, which names `where`, for anything else."""
    try:
        return TypeAdapter(dict[str, RewardAudit]).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]["msg"]
        raise LineageError(f"{where} is no reward audit ({first}); run the audit again") from None


def reward_rows(rows: Sequence[Mapping[str, Any]]) -> RewardRows:
    """RL rows in canonical form as reward functions get them, with no completions yet."""
    names = [name for name in (rows[0] if rows else ()) if name != "prompt"]
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    columns["messages"] = [row["prompt"] for row in rows]
    columns["ground_truth"] = [row["reward_model"]["ground_truth"] for row in rows]
    prompts = [messages[-1]["content"] for messages in columns["messages"]]
    return RewardRows(prompts, [""] * len(prompts), columns)


def audit_scorer(
    config: RewardConfig,
    rows: RewardRows,
    *,
    plugins: tuple[str, ...] = (),
    code: str = "",
    forms: Sequence[str] = (),
    deadline_s: float = 900.0,
) -> RewardAudit:
    """Audit the scorer of `config` on the first `ROWS` rows of each data source.

    Completions in `rows` are not read. `plugins` register rewards, and `code` is their digest.
    forms: of answers, beside the usual ones, e.g. "Result: {}". A probe that can't begin within
    `deadline_s` seconds is a hole. Raises ConfigError and RewardError for a reward that can't be
    opened, and for rows that don't fit it.
    """
    identity = scorer_identity(config, code)
    if config.name == ENVIRONMENT:
        note = Check(ENVIRONMENT, "", "what gives the reward", "", "it reads no answer", "note")
        return RewardAudit(identity, True, 0, 0, 0.0, 0.0, (note,))
    with closing(Scorer(config, plugins)) as scorer:
        auditor = _Auditor(scorer, _first_rows(rows), (*forms, *probes.FORMS))
        auditor.run(time.monotonic() + deadline_s)
    return RewardAudit(
        identity,
        passed=all(check.severity != "hole" for check in auditor.checks),
        rows=len(auditor.rows),
        completions=sum(size for _, size, _ in auditor.calls),
        seconds=sum(seconds for _, _, seconds in auditor.calls),
        memory_mib=auditor.memory_mib,
        checks=tuple(auditor.checks),
    )


def _first_rows(rows: RewardRows) -> RewardRows:
    """`ROWS` of each source; those whose answers arithmetic may leave alone come last."""
    if not len(rows):
        raise RewardError("there are no rows to audit a reward on; give at least one")
    truths, by_source = _column(rows, "ground_truth"), defaultdict[str, list[int]](list)
    alone = [probes.answer_text(truth) in ("0", "1", "-1") for truth in truths]
    for row in sorted(range(len(rows)), key=alone.__getitem__):
        by_source[str(_column(rows, SOURCE)[row])].append(row)
    return rows.select([row for of_source in by_source.values() for row in of_source[:ROWS]])


def _column(rows: RewardRows, name: str) -> Sequence[object]:
    return rows.columns.get(name, [""] * len(rows))


def _resident_mib() -> float:
    """Memory of this process and its children."""
    total, this = 0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            total += process.memory_info().rss
    return total / 2**20


class _Score(NamedTuple):
    total: float
    right: bool
    cause: str  # why there is no score, or ""


class _Row(NamedTuple):
    """A row in one form of answers, and what a right and a wrong answer earn there."""

    number: int  # of the row among those that are audited
    case: Case
    right: _Score
    wrong: _Score

    def gain(self, score: _Score) -> float:
        """The share of what a right answer earns over a wrong one."""
        low, high = self.wrong.total, self.right.total
        return (score.total - low) / (high - low) if high > low else float(score.right)

    def credits(self, score: _Score) -> bool:
        return score.right or self.gain(score) >= _CREDIT


_Scored = list[tuple[_Row, str, _Score]]  # with completions


def _separation(rows: Sequence[_Row]) -> tuple[float, float]:
    """How far right answers are from wrong ones: in the share that is right, in mean score."""
    shares = (float(row.right.right) - float(row.wrong.right) for row in rows)
    return fmean(shares), fmean(row.right.total - row.wrong.total for row in rows)


class _Auditor:
    """The checks of one scorer as they are made."""

    def __init__(self, scorer: Scorer, rows: RewardRows, forms: Sequence[str]) -> None:
        self.scorer, self.rows, self._forms = scorer, rows, forms
        self.checks: list[Check] = []
        self.calls: list[tuple[str, int, float]] = []  # what for, completions, seconds
        self.memory_mib = 0.0
        self._sources = list(map(str, _column(rows, SOURCE)))
        self._truths = _column(rows, "ground_truth")
        self._answered: _Scored = []  # right and wrong answers in all forms
        self._late = 0  # completions past their deadline
        entry = registered_reward(scorer.config.name)
        self._form_only = entry is not None and entry.form_only(scorer.config.options)

    def run(self, until: float) -> None:
        """Make all checks; no probe begins after `until` of the monotonic clock."""
        memory = _resident_mib()
        for source in dict.fromkeys(self._sources):
            reads = self._read([i for i, other in enumerate(self._sources) if other == source])
            for probe in probes.BATTERY:
                applies = probe.of_form or not self._form_only
                if applies and any(row.case.kind in probe.kinds for row in reads[0]):
                    expected = "credit" if probe.credit else "no credit"
                    check = Check(probe.name, source, probe.meaning, expected)
                    self.checks.append(self._probe(probe, check, reads, until))
        if not self._form_only:
            self._compare_graders()
        self._repeat()
        self.memory_mib = max(0.0, _resident_mib() - memory)
        self._cost()

    def score(self, at: Sequence[int], texts: Sequence[str], label: str) -> list[_Score]:
        """Score one completion of each row in one call."""
        rows, begun = replace(self.rows.select(at), completions=texts), time.monotonic()
        # Not `Scorer.score`, which logs failures: probes provoke them.
        scores, _ = score_rows(self.scorer.reward, rows, self.scorer.config.timeout_s)
        self.calls.append((label, len(at), time.monotonic() - begun))
        right = self.scorer.correct(scores, [self._sources[row] for row in at])
        causes = [scores.failures[i].cause if i in scores.failures else "" for i in range(len(at))]
        self._late += causes.count("deadline")
        return list(map(_Score, self.scorer.totals(scores), right, causes))

    def _read(self, at: list[int]) -> list[list[_Row]]:
        """Score right and wrong answers in each form; return the forms that tell most apart."""
        answers = [probes.answer_text(self._truths[row]) for row in at]
        reads = [self._in_form(form, at, answers) for form in self._forms]
        best = max(map(_separation, reads))
        if max(best) <= 0 and all(answer.isdecimal() and int(answer) < 26 for answer in answers):
            letters = [chr(ord("A") + int(answer)) for answer in answers]  # of numbered choices
            reads = [self._in_form(form, at, letters) for form in self._forms]
            best = max(map(_separation, reads))
        return [rows for rows in reads if _separation(rows) == best][:_FORMS]

    def _in_form(self, form: str, at: list[int], answers: list[str]) -> list[_Row]:
        cases = probes.cases(form, [self.rows.prompts[row] for row in at], answers)
        texts = [[c.put(c.truth) for c in cases], [c.put(c.wrong) for c in cases]]
        right, wrong = (self.score(at, side, "answers") for side in texts)
        rows = list(map(_Row, at, cases, right, wrong))
        for side, scores in zip(texts, (right, wrong), strict=True):
            self._answered += zip(rows, side, scores, strict=True)
        return rows

    def _probe(self, probe: Probe, check: Check, reads: list[list[_Row]], until: float) -> Check:
        """Score all completions of a probe; report the one that did worst."""
        causes, worst, count = Counter[str](), (-1, -1.0), 0
        for rows in reads:
            for written in _completions(probe, rows):
                if time.monotonic() > until:
                    return replace(check, found="no time was left for it", severity="hole")
                at, texts = [row.number for row, _ in written], [text for _, text in written]
                scores = self.score(at, texts, probe.name)
                causes.update(score.cause for score in scores if score.cause)
                count += len(scores)
                scored = [(row, text, s) for (row, text), s in zip(written, scores, strict=True)]
                severity, share = _judge(probe, rows, scored)
                if (rank := (_ORDER.index(severity), share)) > worst:
                    worst, check = rank, _described(check, severity, scored)
        if causes:
            fails = self.scorer.config.on_error == "fail" or causes.total() == count * probe.credit
            severity = max(check.severity, "hole" if fails else "warning", key=_ORDER.index)
            failed = ", ".join(f"{cause} {number}" for cause, number in causes.items())
            check = replace(check, severity=severity, found=f"{check.found}; no score: {failed}")
        return check

    def _compare_graders(self) -> None:
        """Compare verdicts on right and wrong answers with those of a lenient reader."""
        rows, texts, scores = zip(*self._answered, strict=True)
        sources, truths = (
            [self._sources[r.number] for r in rows],
            [self._truths[r.number] for r in rows],
        )
        read = self.scorer.leniently_right(texts, sources, truths)
        verdicts = [v for v in zip(rows, texts, scores, read, strict=True) if v[3] is not None]
        alone = [(row, text, s) for row, text, s, verdict in verdicts if s.right and not verdict]
        missed = sum(bool(verdict) and not s.right for _, _, s, verdict in verdicts)
        check = Check("second grader", "", "a lenient reader of the last answer", "agreement")
        if alone:
            check = _described(check, "note", alone)
        if len(alone) > _PART * len(verdicts):
            check = replace(check, severity="warning")
        found = f"of {len(verdicts)} the scorer alone takes {len(alone)}, the reader {missed}"
        self.checks.append(replace(check, found=found))

    def _repeat(self) -> None:
        """Score the same completions again, in other order and in other batches."""
        sample = self._answered[:: max(1, len(self._answered) // 48)]
        at, texts = [row.number for row, _, _ in sample], [text for _, text, _ in sample]
        everything = range(len(at))
        first = self.score(at, texts, "repeated")
        spread = max(s.total for s in first) - min(s.total for s in first)
        batches = {
            "same input twice": [everything],
            "other order": [everything[::-1]],
            "other batch": [everything[:1], everything[1:16], everything[16:]],
        }
        for name, parts in batches.items():
            changed, most = 0, 0.0
            for part in filter(None, parts):
                again = self.score([at[i] for i in part], [texts[i] for i in part], "repeated")
                for i, score in zip(part, again, strict=True):
                    changed += score.right != first[i].right
                    most = max(most, abs(score.total - first[i].total))
            severity: Severity = "note" if most > _ROUNDING * spread else "ok"
            severity = "hole" if changed or most > max(_PART * spread, 1e-6) else severity
            found = f"{changed} of {len(at)} verdicts change, scores by {most:.3g} at most"
            self.checks.append(Check(name, "", "answers again", "the same", found, severity))

    def _cost(self) -> None:
        """Report time and memory of the calls."""
        each = [(1000 * seconds / size, label) for label, size, seconds in self.calls]
        usual, (slowest, label) = median(milliseconds for milliseconds, _ in each), max(each)
        found = f"{usual:.3g} ms a completion, {slowest:.3g} ms of {label!r}, {self._late} too late"
        late: Severity = "warning" if self._late else "ok"
        self.checks.append(Check("time", "", "of a call", "within deadlines", found, late))
        found = f"{self.memory_mib:.0f} MiB more after {len(each)} calls"
        large: Severity = "warning" if self.memory_mib > _MEMORY_MIB else "ok"
        expected = f"below {_MEMORY_MIB:.0f} MiB"
        self.checks.append(Check("memory", "", "of the scorer", expected, found, large))


def _completions(probe: Probe, rows: Sequence[_Row]) -> list[list[tuple[_Row, str]]]:
    """A probe's completions of the rows that it applies to, by their number."""
    chosen = [row for row in rows if row.case.kind in probe.kinds][: probe.most_rows]
    columns = zip(*(probe.write(row.case) for row in chosen), strict=True)
    made = ([(r, t) for r, t in zip(chosen, c, strict=True) if t is not None] for c in columns)
    return [written for written in made if written]


def _judge(probe: Probe, rows: Sequence[_Row], scored: _Scored) -> tuple[Severity, float]:
    """How bad the scores of one of a probe's completions are, and on which share of the rows."""
    share = fmean(row.credits(score) for row, _, score in scored)
    if probe.credit:
        return ("warning" if share < 1 - _RARELY else "ok"), 1 - share
    if probe.by_chance:  # what one constant answer gets, and more as rows are few
        answers = Counter(row.case.truth for row in rows)
        constant = answers.most_common(1)[0][1] / len(rows)
        return ("hole" if share > _BY_CHANCE + constant * (constant < _CREDIT) else "ok"), share
    gained = fmean(row.gain(score) for row, _, score in scored) > _PART
    return ("hole" if share > _RARELY else "warning" if gained else "ok"), share


def _described(check: Check, severity: Severity, scored: _Scored) -> Check:
    """The check with what was found, and an example where that is not as expected."""
    credited = [row.credits(score) for row, _, score in scored]
    mean = fmean(score.total for _, _, score in scored)
    found = f"credit on {sum(credited)} of {len(scored)} rows, mean score {mean:.3g}"
    check = replace(check, found=found, severity=severity, score=mean)
    if severity == "ok":
        return check
    unexpected = check.expected != "credit"
    row, text, _ = scored[credited.index(unexpected) if unexpected in credited else 0]
    return replace(check, completion=text[:_SHOWN], truth=row.case.truth[:_SHOWN])
