"""The samples of a run as one HTML page that needs nothing else, for a browser or a Flyte Deck.

The page's data is bounded: of too many steps every second one is left out, of a long completion the
end. Completions are hostile text: the page's script puts them into text nodes alone, and a content
security policy permits this script and style and no address at all. Loads no torch.
"""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from markupsafe import Markup

from engine import html_templates
from engine.html_templates import printable
from engine.samples.sample_files import COMPONENT, TOKEN_VALUES, Metrics, SampleFolder, SampleName

_TEMPLATES = html_templates.environment(__package__)
MAX_TOKENS = 300_000  # of a page
MAX_TOKENS_A_ROW = 1024
MAX_TOKENS_AN_EPISODE = 4096
MAX_POINTS = 400  # of a curve
MODEL_STEP = "final/step"  # metric of a finished run: the step of the model that it hands over
# Characters with a meaning in HTML or JavaScript; in JSON's strings they have escapes.
_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


# Names on the page of a sample's columns, as they are.
_COLUMNS = {
    "group": "group", "truth": "ground_truth", "source": "data_source", "correct": "correct",
    "truncated": "truncated", "error": "reward_error", "version": "policy_version",
}  # fmt: skip
_OF_EPISODES = {
    "firstTurn": "first_turn", "allTurns": "episode_turns", "end": "end",
    "fault": "episode_error", "info": "episode_info",
}  # fmt: skip


class _Shown(NamedTuple):
    order: int  # among the samples of its split, from 0
    tokens: int
    text: str  # JSON of the sample


class PageData:
    """The samples and curves of a run, to which the next ones are added in the order of steps."""

    def __init__(self) -> None:
        self._shown: dict[SampleName, _Shown] = {}
        self._stride: dict[str, int] = {}  # by split: orders that it divides are shown
        self._count: dict[str, int] = {}  # by split: samples so far
        self._curves: dict[str, tuple[array[int], array[float]]] = {}  # by metric: steps, values

    def add(self, name: SampleName, table: pa.Table, metrics: Sequence[Metrics]) -> None:
        """Add a sample and the metrics of its file."""
        for row in metrics:
            for metric, value in row.items():
                steps, values = self._curves.setdefault(metric, (array("q"), array("d")))
                steps.append(int(row["step"]))
                values.append(value)
        if not table.num_rows:
            return
        split, order = name.split, self._count.get(name.split, 0)
        self._count[split] = order + 1
        before = self._of(split)[-1:]  # shown as the last one, whatever its order
        if before and self._shown[before[0]].order % self._stride[split]:
            del self._shown[before[0]]
        self._stride.setdefault(split, 1)
        text, tokens = _sample_json(name, table)
        self._shown[name] = _Shown(order, tokens, text)
        while sum(shown.tokens for shown in self._shown.values()) > MAX_TOKENS and self._thin():
            pass

    def __len__(self) -> int:
        """The number of samples that were added."""
        return sum(self._count.values())

    def as_json(self) -> str:
        """The data as JSON that may stand in a script element of HTML."""
        samples = ",".join(self._shown[name].text for name in sorted(self._shown))
        curves = {name: _points(*self._curves[name]) for name in sorted({*self._curves} - {"step"})}
        ends, models = curves.pop(MODEL_STEP, [[-1], [None]])
        model = models[-1] if ends[-1] == max((n.step for n in self._shown), default=0) else None
        facts = {"leftOut": len(self) - len(self._shown), "model": model, "curves": curves}
        return f'{_json(facts)[:-1]},"samples":[{samples}]}}'

    def _thin(self) -> bool:
        """Leave out every second sample of the split that has most; False where none can go."""
        split = max(self._stride, key=lambda split: len(self._of(split)))
        between = self._of(split)[1:-1]
        self._stride[split] *= 2
        for name in between:
            if self._shown[name].order % self._stride[split]:
                del self._shown[name]
        return bool(between)

    def _of(self, split: str) -> list[SampleName]:
        return [name for name in self._shown if name.split == split]


def _points(steps: Sequence[int], values: Sequence[float]) -> list[list[float | None]]:
    """Return steps and values of a curve, the last one among them."""
    stride = math.ceil(len(steps) / MAX_POINTS)
    points = [*range(0, len(steps) - 1, stride), len(steps) - 1]
    return [[steps[i] for i in points], [_number(values[i]) for i in points]]


def _sample_json(name: SampleName, table: pa.Table) -> tuple[str, int]:
    """Return a sample as JSON, each text once, and how many tokens it shows."""
    vocabulary: dict[str, int] = {}
    prompts: dict[str, int] = {}
    components = [c for c in table.column_names if c.startswith(COMPONENT)]
    rows, tokens = [], 0
    for row in table.to_pylist():
        limit = MAX_TOKENS_AN_EPISODE if row.get("turns") is not None else MAX_TOKENS_A_ROW
        texts = [str(printable(text)) for text in row["tokens"][:limit]]
        tokens += len(texts)
        parts = {str(printable(c.removeprefix(COMPONENT))): _number(row[c]) for c in components}
        rows.append(
            {shown: printable(row[column]) for shown, column in _COLUMNS.items()}
            | {
                "prompt": prompts.setdefault(str(printable(row["prompt"])), len(prompts)),
                "reward": _number(row["reward"]),
                "shaped": _number(row["shaped_reward"]),
                "parts": parts,
                "length": len(row["tokens"]),
                "tokens": [vocabulary.setdefault(text, len(vocabulary)) for text in texts],
            }
            | {column: _values(row[column], limit) for column in TOKEN_VALUES}
            | _versions(row)
            | _episode(row)
        )
    texts_once = {"vocabulary": list(vocabulary), "prompts": list(prompts)}
    return _json({"step": name.step, "split": name.split, **texts_once, "rows": rows}), tokens


def _versions(row: Mapping[str, Any]) -> dict[str, object]:
    """Return a row's policy versions, if it has any, each with the token that it begins at."""
    versions = row.get("token_versions") or []
    begins = [i for i, version in enumerate(versions) if not i or version != versions[i - 1]]
    return {"versions": [[i, versions[i]] for i in begins]} if begins else {}


def _episode(row: Mapping[str, Any]) -> dict[str, object]:
    """What an episode has beside a completion: its turns, and how it went."""
    if row.get("turns") is None:
        return {}
    turns = [
        {
            "start": turn["start"],
            "stop": turn["stop"],
            "reward": _number(turn["reward"]),
            "untrained": [i for i in range(turn["start"], turn["stop"]) if not row["trained"][i]],
            "calls": [[printable(c["name"]), printable(c["arguments"])] for c in turn["calls"]],
            "malformed": [printable(sentence) for sentence in turn["malformed"]],
        }
        for turn in row["turns"]
    ]
    numbers = {"given": "episode_reward", "seconds": "environment_seconds"}
    return (
        {"turns": turns}
        | {shown: printable(row[column]) for shown, column in _OF_EPISODES.items()}
        | {shown: _number(row[column]) for shown, column in numbers.items()}
    )


def _values(values: Sequence[float] | None, limit: int) -> float | list[float | None] | None:
    """A value a token, rounded to three digits; one number where all are the same."""
    if values is None:
        return None
    shown = np.round(np.asarray(values[:limit], dtype=np.float64), 3)
    if not np.isfinite(shown).all():
        return [float(v) if math.isfinite(v) else None for v in shown]
    if len(shown) and (shown == shown[0]).all():
        return float(shown[0])
    return shown.tolist()


def _number(value: float | None) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def render_page(data: PageData, title: str) -> str:
    """Return the page; title: which run it is of."""
    css = html_templates.stylesheet()
    files = ("curves.js", "episodes.js", "rollouts.js")
    script = Markup("").join(html_templates.asset(__package__, name) for name in files)
    policy, json_data = html_templates.content_policy(css, script), Markup(data.as_json())
    template = _TEMPLATES.get_template("rollouts.html.j2")
    return template.render(css=css, data=json_data, policy=policy, script=script, title=title)


def page_of(folder: SampleFolder) -> str:
    """Return the page of all samples in a folder."""
    data = PageData()
    for name in folder.names():
        data.add(name, *folder.read(name))
    return render_page(data, run_name(folder.uri))


def run_name(uri: str) -> str:
    """Return a title: the last two parts of the run's address above `rollouts`."""
    parts = [part for part in uri.split("/") if part]
    above = parts[:-1] if parts[-1:] == ["rollouts"] else parts
    return "/".join(above[-2:]) or str(Path(uri))
