"""The reward audit: whether a scorer can be fooled, by the battery of `probes` on rows of data.

Right and wrong answers in all usual forms come first. A probe is credited on a row where the scorer
calls it right, or where it earns half or more of what a right answer earns over a wrong one. Credit
without a right answer is a hole, and a hole fails the audit.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import psutil
from pydantic import TypeAdapter, ValidationError

from engine.config import RewardConfig
from engine.errors import LineageError, RewardError
from engine.rewards import probes
from engine.rewards.answers import ENVIRONMENT, answer_text
from engine.rewards.calls import RewardRows, score_rows
from engine.rewards.probes import Case, Probe
from engine.rewards.reward_function import RewardFailure, registered_reward
from engine.rewards.scorer import SOURCE, Scorer, scorer_identity

Severity = Literal["ok", "note", "warning", "hole"]
_ORDER: tuple[Severity, ...] = ("ok", "note", "warning", "hole")
ROWS = 16  # of a source that are probed
NOT_AUDITED = "nothing to audit, as the environment gives the reward"
_FORMS = 2  # that are probed, of those in which right answers earn most
_CREDIT, _PART = 0.5, 0.1  # shares of what a right answer earns over a wrong one
_RARELY, _BY_CHANCE = 0.05, 0.15  # shares of rows on which credit is no hole
_ROUNDING = 1e-4  # of the scores' spread
_MEMORY_MIB = 1024.0
_SHOWN = 300  # characters of an example
_TIME_IS_UP = RewardFailure("deadline", "the audit's own time is up")


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a probe on the rows of one source, or of another check on all rows."""

    name: str  # e.g. "hedged list"
    source: str = ""  # the rows' data_source; empty: all rows
    found: str = ""  # e.g. "credit on 12 of 16 rows, mean score 0.75"
    severity: Severity = "ok"
    completion: str = ""  # an example of what is not as expected; a long one is cut
    truth: str = ""  # its right answer


@dataclass(frozen=True, slots=True)
class RewardAudit:
    """All checks of one scorer; `passed` where none of them found a hole."""

    scorer: str  # as in an evaluation's manifest, see `scorer_identity`
    passed: bool
    rows: int  # of data that were probed
    checks: tuple[Check, ...]

    def names(self, severity: Severity) -> list[str]:
        """The names of the checks of a severity, each once."""
        return list(dict.fromkeys(c.name for c in self.checks if c.severity == severity))

    def record(self) -> dict[str, object]:
        """What an evaluation's manifest records."""
        names = {"holes": self.names("hole"), "warnings": self.names("warning")}
        return {"scorer": self.scorer, "passed": self.passed, "rows": self.rows, **names}

    def sentence(self) -> str:
        """E.g. `failed, holes: hedged list, chain; 32 checks on 16 rows`."""
        if not self.rows:
            return NOT_AUDITED
        parts = ["passed" if self.passed else "failed"]
        for severity in ("hole", "warning"):
            if names := self.names(severity):
                parts.append(f"{severity}s: {', '.join(names)}")
        return f"{', '.join(parts)}; {len(self.checks)} checks on {self.rows} rows"


def audit_line(record: Mapping[str, Any]) -> str:
    """Say how an audit ended, from its `RewardAudit.record` in an evaluation's manifest."""
    if record.get("rows") == 0:  # older ones don't say
        return NOT_AUDITED
    return "passed" if record["passed"] else f"can be fooled: {', '.join(record['holes'])}"


_AUDITS = TypeAdapter(dict[str, RewardAudit])  # by who scores, e.g. `rl`


def to_json(audits: dict[str, RewardAudit]) -> str:
    """Strict JSON of audits by who scores."""
    return _AUDITS.dump_json(audits, indent=2).decode()


def from_json(text: bytes, where: str) -> dict[str, RewardAudit]:
    """Read what `to_json` wrote; LineageError, which names `where`, for anything else."""
    try:
        return _AUDITS.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]["msg"]
        raise LineageError(f"{where} is no reward audit ({first}); run the audit again") from None


def reward_rows(rows: Sequence[Mapping[str, Any]]) -> RewardRows:
    """RL rows in canonical form as reward functions get them, with no completions yet."""
    names = [name for name in (rows[0] if rows else ()) if name != "prompt"]
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    columns["messages"] = [list(row["prompt"]) for row in rows]
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
    forms: of answers, beside the usual ones, e.g. "Result: {}". No call begins after `deadline_s`
    seconds; a probe that is left then is a hole. Raises ConfigError and RewardError for a reward
    that can't be opened, and for rows that don't fit it.
    """
    identity = scorer_identity(config, code)
    if config.name == ENVIRONMENT:
        note = Check(ENVIRONMENT, found="it gives the reward and reads no answer", severity="note")
        return RewardAudit(identity, True, 0, (note,))
    until = time.monotonic() + deadline_s
    with closing(Scorer(config, plugins)) as scorer:
        auditor = _Auditor(scorer, _first_rows(rows), (*forms, *probes.FORMS), until)
        checks = tuple(auditor.checks())
    passed = all(check.severity != "hole" for check in checks)
    return RewardAudit(identity, passed, len(auditor.rows), checks)


def _first_rows(rows: RewardRows) -> RewardRows:
    """Select the first `ROWS` rows of each source."""
    if not len(rows):
        raise RewardError("there are no rows to audit a reward on; give at least one")
    by_source = defaultdict[str, list[int]](list)
    for row, source in enumerate(_column(rows, SOURCE)):
        by_source[str(source)].append(row)
    return rows.select([row for of_source in by_source.values() for row in of_source[:ROWS]])


def _column(rows: RewardRows, name: str) -> list[object]:
    return list(rows.columns.get(name, [""] * len(rows)))


def _resident_mib() -> float:
    """Memory of this process and its children."""
    total, this = 0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            total += process.memory_info().rss
    return total / 2**20


class _Scored(NamedTuple):
    """What the scorer says of one completion."""

    case: Case
    completion: str
    total: float
    right: bool
    failure: RewardFailure | None  # why there is no score

    @property
    def gain(self) -> float:
        """The share of what a right answer earns over a wrong one."""
        low, high = self.case.worth
        return (self.total - low) / (high - low) if high > low else float(self.right)

    @property
    def credited(self) -> bool:
        return self.right or self.gain >= _CREDIT

    def example(self) -> tuple[str, str]:
        """The completion, cut, and its right answer."""
        return self.completion[:_SHOWN], self.case.truth[:_SHOWN]


class _Auditor:
    """The checks of one scorer as they are made; no call begins after `until`."""

    def __init__(
        self, scorer: Scorer, rows: RewardRows, forms: Sequence[str], until: float
    ) -> None:
        self.scorer, self.rows, self._forms, self._until = scorer, rows, forms, until
        self._sources = list(map(str, _column(rows, SOURCE)))
        self._truths = _column(rows, "ground_truth")
        self._answered: list[_Scored] = []  # right and wrong answers in all forms
        self._costs: list[tuple[float, str]] = []  # of calls: ms a completion, and what for
        self._late = 0  # completions past their deadline

    def checks(self) -> Iterator[Check]:
        """Make all checks."""
        memory, entry = _resident_mib(), registered_reward(self.scorer.config.name)
        form_only = entry is not None and entry.form_only(self.scorer.config.options)
        for source in dict.fromkeys(self._sources):
            before = len(self._answered)
            reads = self._read([i for i, other in enumerate(self._sources) if other == source])
            if all(scored.failure for scored in self._answered[before:]):
                found = _no_score(self._answered[before:])
                yield Check("right answer", source, found, "hole")
                continue
            for probe in probes.BATTERY:
                applies = probe.of_form or not form_only
                if applies and any(case.kind in probe.kinds for case in reads[0]):
                    yield self._probe(probe, source, reads)
        if any(not scored.failure for scored in self._answered):
            if not form_only:
                yield self._second_grader()
            yield from self._repeat()
        if self._costs:
            yield from self._cost(_resident_mib() - memory)

    def score(self, cases: Sequence[Case], texts: Sequence[str], label: str) -> list[_Scored]:
        """Score one completion of each case in one call."""
        begun, at = time.monotonic(), [case.row for case in cases]
        limit_s = min(self.scorer.config.timeout_s, self._until - begun)
        if limit_s <= 0:
            return [_Scored(*c, 0.0, False, _TIME_IS_UP) for c in zip(cases, texts, strict=True)]
        rows = replace(self.rows.select(at), completions=texts)
        # Not `Scorer.score`, which logs failures: probes provoke them.
        scores, _ = score_rows(self.scorer.reward, rows, limit_s)
        self._costs.append((1000 * (time.monotonic() - begun) / len(at), label))
        self._late += sum(failure.cause == "deadline" for failure in scores.failures.values())
        right = self.scorer.correct(scores, [self._sources[row] for row in at])
        failures = map(scores.failures.get, range(len(at)))
        return list(map(_Scored, cases, texts, self.scorer.totals(scores), right, failures))

    def _read(self, at: list[int]) -> list[list[Case]]:
        """Score right and wrong answers in each form; return the forms that tell most apart."""
        answers = [answer_text(self._truths[row]) for row in at]
        writings = [answers]
        if all(answer.isdecimal() and int(answer) < 26 for answer in answers):  # numbered choices
            writings.append([chr(ord("A") + int(answer)) for answer in answers])
        reads = []
        for form, written in ((form, written) for written in writings for form in self._forms):
            reads.append(self._in_form(form, at, written))
            latest = [scored.failure for scored in self._answered[-2 * len(at) :]]
            if all(failure and failure.cause == "deadline" for failure in latest):
                break  # it hangs, and would in other forms
        best = max(separation for separation, _ in reads)
        return [cases for separation, cases in reads if separation == best][:_FORMS]

    def _in_form(
        self, form: str, at: list[int], answers: list[str]
    ) -> tuple[tuple[float, float], list[Case]]:
        """Score one form; return how far it tells right from wrong (share, score), and cases."""
        cases = probes.cases(form, at, [self.rows.prompts[row] for row in at], answers)
        right = self.score(cases, [case.put(case.truth) for case in cases], "answers")
        wrong = self.score(cases, [case.put(case.wrong) for case in cases], "answers")
        self._answered += [*right, *wrong]
        for case, high, low in zip(cases, right, wrong, strict=True):
            case.worth = low.total, high.total
        shares = (fmean(one.right for one in side) for side in (right, wrong))
        return (next(shares) - next(shares), fmean(c.worth[1] - c.worth[0] for c in cases)), cases

    def _probe(self, probe: Probe, source: str, reads: list[list[Case]]) -> Check:
        """Score all completions of a probe; report the one that did worst."""
        judged, everything = [], list[_Scored]()
        for cases in reads:
            chosen = [case for case in cases if case.kind in probe.kinds][: probe.most_rows]
            for texts in zip(*map(probe.write, chosen), strict=True):
                written = [i for i, text in enumerate(texts) if text is not None]
                if written:
                    some = [chosen[i] for i in written], [str(texts[i]) for i in written]
                    scored = self.score(*some, probe.name)
                    everything += scored
                    judged.append(_judged(probe, source, scored))
        if not judged:
            return Check(probe.name, source, "none of its texts makes sense here")
        check = max(judged, key=lambda ranked: ranked[0])[1]
        failed = [scored for scored in everything if scored.failure]
        if not failed:
            return check
        fails = self.scorer.config.on_error == "fail" or failed[-1].failure is _TIME_IS_UP
        fails |= probe.credit and len(failed) == len(everything)
        worst = _ORDER[max(_ORDER.index(check.severity), 3 if fails else 2)]
        return replace(check, severity=worst, found=f"{check.found}; {_no_score(failed)}")

    def _second_grader(self) -> Check:
        """Compare verdicts on right and wrong answers with those of a lenient reader."""
        at = [scored.case.row for scored in self._answered]
        read = self.scorer.leniently_right(
            [scored.completion for scored in self._answered],
            [self._sources[row] for row in at],
            [self._truths[row] for row in at],
        )
        pairs = [v for v in zip(self._answered, read, strict=True) if v[1] is not None]
        alone = [scored for scored, verdict in pairs if scored.right and not verdict]
        missed = sum(bool(verdict) and not scored.right for scored, verdict in pairs)
        found = f"of {len(pairs)} answers {len(alone)} are right for the scorer alone, "
        found += f"{missed} for a lenient reader alone"
        if not alone:
            return Check("second grader", "", found)
        severity: Severity = "warning" if len(alone) > _PART * len(pairs) else "note"
        return Check("second grader", "", found, severity, *alone[0].example())

    def _repeat(self) -> Iterator[Check]:
        """Score the same completions again, in other order and in other batches."""
        sample = self._answered[:: max(1, len(self._answered) // 48)]

        def again(part: Sequence[_Scored]) -> list[_Scored]:
            return self.score([s.case for s in part], [s.completion for s in part], "repeated")

        first = again(sample)
        spread = max(s.total for s in first) - min(s.total for s in first)
        for name, parts in {
            "same input twice": [first],
            "other order": [first[::-1]],
            "other batch": [first[:1], first[1:16], first[16:]],
        }.items():
            pairs = [pair for part in parts if part for pair in zip(part, again(part), strict=True)]
            changed = sum(a.right != b.right for a, b in pairs)
            most = max(abs(a.total - b.total) for a, b in pairs)
            severity: Severity = "note" if most > _ROUNDING * spread else "ok"
            severity = "hole" if changed or most > max(_PART * spread, 1e-6) else severity
            found = f"{changed} of {len(pairs)} verdicts change, scores by {most:.3g} at most"
            yield Check(name, "", found, severity)

    def _cost(self, memory_mib: float) -> Iterator[Check]:
        """Report time and memory of the calls."""
        usual, (most, call) = median(cost for cost, _ in self._costs), max(self._costs)
        found = f"{usual:.3g} ms a completion, at most {most:.3g} ({call}), {self._late} too late"
        yield Check("time", "", found, "warning" if self._late else "ok")
        found = f"{max(0.0, memory_mib):.0f} MiB more after {len(self._costs)} calls"
        yield Check("memory", "", found, "warning" if memory_mib > _MEMORY_MIB else "ok")


def _no_score(scored: Sequence[_Scored]) -> str:
    """Say how many completions have no score and why, with the first one's reason."""
    failures = [one.failure for one in scored if one.failure]
    causes = Counter(failure.cause for failure in failures)
    counts = ", ".join(f"{cause} {count}" for cause, count in causes.items())
    return f"no score: {counts} ({failures[0]})"


def _judged(
    probe: Probe, source: str, scored: Sequence[_Scored]
) -> tuple[tuple[int, float], Check]:
    """Judge the scores of one of a probe's completions; return a rank of badness and a check."""
    share = bad = fmean(one.credited for one in scored)
    severity: Severity = "ok"
    if probe.credit:
        bad = 1 - share
        severity = "warning" if bad > _RARELY else "ok"
    elif probe.by_chance:  # what one constant answer gets, and more as rows are few
        answers = Counter(one.case.truth for one in scored)
        constant = answers.most_common(1)[0][1] / len(scored)
        severity = "hole" if share > _BY_CHANCE + constant * (constant < _CREDIT) else "ok"
    elif share > _RARELY:
        severity = "hole"
    elif fmean(one.gain for one in scored) > _PART:
        severity = "warning"
    mean, rows = fmean(one.total for one in scored), len(scored)
    found = f"credit on {round(share * rows)} of {rows} rows, mean score {mean:.3g}"
    unexpected = next((one for one in scored if one.credited != probe.credit), scored[0])
    example = unexpected.example() if severity != "ok" else ()
    return (_ORDER.index(severity), bad), Check(probe.name, source, found, severity, *example)
