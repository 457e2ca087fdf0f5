"""Write samples of a run's rollouts beside training: Parquet, the page, and callbacks.

`pick` runs in the training loop and copies a few groups of a step's batch; a thread decodes, writes
and renders. An error there costs the sample and a sentence in the log, never the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from engine.batch import Batch
from engine.errors import EngineError
from engine.samples import sample_files
from engine.samples.sample_files import TOKEN_VALUES, Metrics, SampleFolder, SampleName
from engine.samples.viewer import MODEL_STEP, PageData, render_page, run_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BROKEN = "\N{REPLACEMENT CHARACTER}"
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark of a space before a word


class TokenTexts:
    """Texts of tokens by a tokenizer of transformers; each token is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return one text a token; the first of a character's tokens has it, the rest are empty."""
        alone = [self._alone(token) for token in ids]
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            texts.append(alone[start])
            if _BROKEN not in alone[start]:
                continue
            # A character of UTF-8 has four bytes at most, and so four tokens.
            for end in range(start + 2, min(start + 4, len(ids)) + 1):
                together = self._decode(ids[start:end])
                if _BROKEN not in together:
                    texts[-1:] = [together, *[""] * (end - start - 1)]
                    break
        return texts

    def _alone(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token]) or f"<{token}>"
        return self._known[token]

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text = str(self._tokenizer.decode(list(ids), **options))
        # SentencePiece's decoders strip the space of a text's first word.
        spaced = str(self._tokenizer.convert_ids_to_tokens(int(ids[0]))).startswith(_WORD_START)
        return f" {text}" if spaced and not text.startswith(" ") else text


LONGEST_PROMPT = 20_000  # characters of it that are recorded
_TENSORS = (
    *("attention_mask", "first_turn", "environment_rewards", "group_ids", "policy_version"),
    *("responses", "reward_components", "token_level_rewards", "token_level_scores"),
    *("token_versions", "truncated", *TOKEN_VALUES),
)
_SPANS = "episode_turn_spans"
_OF_EPISODES = ("prompts", "response_mask")
_COLUMNS = (
    *("completion", "data_source", "environment_seconds", "episode_end", "episode_error"),
    *("episode_info", "episode_reward", "episode_turns", "ground_truth", "has_format", "prompt"),
    *("reward_component_names", "reward_correct", "reward_error_cause", _SPANS),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of the batch of one step."""

    step: int
    split: str  # TRAIN or VALIDATION of `sample_files`
    rows: Batch


def pick(batch: Batch, step: int, split: str, count: int) -> Sample:
    """Copy at most `count` rows: whole groups, as far as they fit, by a digest of their prompt."""
    groups: list[int] = batch["group_ids"].tolist()
    ranks: dict[int, tuple[bytes, int]] = {}  # by group: digest of its prompt, its first row
    for row, group in enumerate(groups):
        if group not in ranks:
            prompt = str(batch.columns["prompt"][row][-1]["content"])[-4096:]
            ranks[group] = hashlib.blake2b(_text(prompt).encode(), digest_size=8).digest(), row
    order = sorted(range(len(groups)), key=lambda row: (ranks[groups[row]], row))
    names = (*_TENSORS, *_COLUMNS, *(_OF_EPISODES if _SPANS in batch else ()))
    rows = batch.select([name for name in names if name in batch]).rows(order[:count])
    return Sample(step, split, rows)


def as_table(sample: Sample, texts: TokenTexts) -> pa.Table:
    """Return a table of `SCHEMA` and a column `reward.NAME` for each component."""
    rows, count = sample.rows, len(sample.rows)
    missing, width = [None] * count, rows["responses"].shape[1]
    lengths: list[int] = rows["attention_mask"][:, -width:].sum(1).tolist()
    ids = _ragged(rows["responses"].numpy(), lengths)
    columns: dict[str, Sequence[object]] = {
        "step": [sample.step] * count,
        "split": [sample.split] * count,
        "group": rows["group_ids"].tolist(),
        "data_source": _texts(rows, "data_source"),
        "prompt": [text[:LONGEST_PROMPT] for text in _prompts(rows, texts)],
        "ground_truth": _texts(rows, "ground_truth"),
        "completion": _texts(rows, "completion"),
        "reward": _sums(rows, "token_level_scores"),
        "shaped_reward": _sums(rows, "token_level_rewards"),
        "correct": _flags(rows, "reward_correct"),
        "has_format": _flags(rows, "has_format"),
        "truncated": rows["truncated"].tolist() if "truncated" in rows else missing,
        "reward_error": _texts(rows, "reward_error_cause"),
        "policy_version": _sums(rows, "policy_version"),
        "token_ids": ids,
        "tokens": [[_text(text) for text in texts(row)] for row in ids],
    }
    for name in TOKEN_VALUES:
        columns[name] = _ragged(rows[name].numpy(), lengths) if name in rows else missing
    if "token_versions" in rows:  # of rows that have more than one
        versions = _ragged(rows["token_versions"].numpy(), lengths)
        columns["token_versions"] = [v if len(set(v)) > 1 else None for v in versions]
    if _SPANS in rows:
        columns |= _episode_columns(rows, lengths)
    table = pa.table(
        {name: columns.get(name, missing) for name in sample_files.SCHEMA.names},
        schema=sample_files.SCHEMA,
    )
    if "reward_components" in rows and count:
        names = rows.columns["reward_component_names"][0]
        for name, values in zip(names, rows["reward_components"].unbind(1), strict=True):
            values = pa.array(values.tolist(), pa.float32(), from_pandas=True)  # NaN as null
            table = table.append_column(sample_files.COMPONENT + _text(name), values)
    return table


def _prompts(rows: Batch, texts: TokenTexts) -> list[str]:
    """A row's messages, or the tokens that an episode began with, of its environment maybe."""
    if _SPANS not in rows:
        return [prompt_text(messages) for messages in rows.columns["prompt"]]
    prompts = rows["prompts"]
    present = rows["attention_mask"][:, : prompts.shape[1]].bool()
    both = zip(prompts, present, strict=True)
    return [_text("".join(texts(ids[mask].tolist()))) for ids, mask in both]


def _episode_columns(rows: Batch, lengths: Sequence[int]) -> dict[str, Sequence[object]]:
    rewards, columns = rows["environment_rewards"], rows.columns
    return {
        "trained": _ragged(rows["response_mask"].bool().numpy(), lengths),
        "turns": [
            [_turn(turn, rewards[row]) for turn in turns]
            for row, turns in enumerate(columns[_SPANS])
        ],
        "first_turn": rows["first_turn"].tolist() if "first_turn" in rows else [0] * len(rows),
        "episode_turns": list(map(int, columns["episode_turns"])),
        "episode_reward": list(map(float, columns["episode_reward"])),
        "end": _texts(rows, "episode_end"),
        "episode_error": _texts(rows, "episode_error"),
        "episode_info": _texts(rows, "episode_info"),
        "environment_seconds": list(map(float, columns["environment_seconds"])),
    }


def _turn(turn: dict[str, Any], rewards: Tensor) -> dict[str, object]:
    """A `TURN` from an entry of `turn_spans`; `rewards` [R] are the environment's."""
    start, stop, calls = turn["start"], turn["stop"], turn["calls"]
    return {
        "start": start,
        "stop": stop,
        "reward": float(rewards[start:stop].sum()),
        "calls": [{"name": _text(name), "arguments": _text(values)} for name, values in calls],
        "malformed": list(map(_text, turn["malformed"])),
    }


def prompt_text(messages: Sequence[dict[str, object]]) -> str:
    """Return chat messages as text: a lone user's as it is, others below their roles."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return _text(messages[0]["content"])
    return "\n\n".join(f"[{_text(m['role'])}]\n{_text(m['content'])}" for m in messages)


def _sums(rows: Batch, name: str) -> list[float | None]:
    """Return a value a row: a tensor `[B]`, or the sums of one `[B, R]`."""
    if name not in rows:
        return [None] * len(rows)
    return rows[name].reshape(len(rows), -1).sum(1).tolist() if len(rows) else []


def _flags(rows: Batch, name: str) -> list[bool | None]:
    values = rows.columns.get(name, [None] * len(rows))
    return [None if value is None else bool(value) for value in values]


def _texts(rows: Batch, name: str) -> list[str]:
    values = rows.columns.get(name)
    return [""] * len(rows) if values is None else [_text(value) for value in values]


def _text(value: object) -> str:
    """Return any value as text that UTF-8 can hold; null is empty."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode("utf-8")


def _ragged(values: np.ndarray, lengths: Sequence[int]) -> list[list[Any]]:
    return [row[:length].tolist() for row, length in zip(values, lengths, strict=True)]


PAGE_SECONDS = 10.0  # between two renderings of the page, while samples come
CLOSE_SECONDS = 60.0  # for what is still to be written when the run ends
MAX_WAITING = 8  # steps; a store that is slower loses samples

log = logging.getLogger(__name__)

OnFile = Callable[[Path], None]  # a file that was written, under its own name
OnPage = Callable[[str], None]  # the page as HTML


class RolloutLog(contextlib.AbstractContextManager["RolloutLog"]):
    """Samples every `every` steps, the first and the last one; a context manager.

    A thread of its own writes them: the methods that begin with `_on_thread` run there.
    """

    def __init__(
        self,
        folder: str | Path,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
        *,
        every: int,
        rows: int,
        last_step: int,
        previous: str | Path | None = None,
        on_file: OnFile | None = None,
        on_page: OnPage | None = None,
    ) -> None:
        """Write to `folder` (or s3://…); resume from `previous`, an earlier attempt's folder.

        `rows`: of a sample; `every=0`: none. Its thread calls `load_tokenizer`, `on_file` and
        `on_page`.
        """
        self.every, self.rows, self.last_step = every, rows, last_step
        self.model_step = 0.0  # of the model that the run hands over, once it does
        self._picked: list[Sample] = []
        self._uri, self._previous = str(folder), previous
        self._load_tokenizer = load_tokenizer
        self._on_file, self._on_page = on_file, on_page
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        # The thread's own.
        self._fault = ""  # of the job before, without its numbers
        self._texts: TokenTexts | None = None
        self._data = PageData()
        self._metrics_up_to = 0  # step whose metrics are in a file
        self._page_due = 0.0  # of time.monotonic

    def rollouts(self, split: str, step: int, batch: Batch) -> None:
        """Take a sample of a step's batch, if it is due; `step_done` lets it be written."""
        due = step in (1, self.last_step) or (self.every and step % self.every == 0)
        if self.every and (due or split != sample_files.TRAIN):
            self._picked.append(pick(batch, step, split, self.rows))

    def step_done(self, history: Sequence[Metrics]) -> None:
        """Write the step's samples; `history` are the metrics of all steps so far, a row a step."""
        picked, self._picked = self._picked, []
        if picked:
            self._put(lambda: self._on_thread_write(picked, list(history)))

    def resumed(self, step: int) -> None:
        """Drop samples of steps after `step`, from which the run goes on."""
        self._picked.clear()
        if self.every:
            self._put(lambda: self._on_thread_resume(step), timeout=CLOSE_SECONDS)

    def close(self) -> None:
        """Write the samples that are left, within `CLOSE_SECONDS`."""
        if self._thread is None:
            return
        end = time.monotonic() + CLOSE_SECONDS
        for job in (self._on_thread_finish, None):
            with contextlib.suppress(queue.Full):
                self._jobs.put(job, timeout=max(0.0, end - time.monotonic()))
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.warning("the last samples of rollouts may be missing: %s is too slow", self._uri)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, job: Callable[[], None], timeout: float = 0.0) -> None:
        """Let the thread do a job; leave it out where too many do wait."""
        if self._thread is None:
            # A daemon: a run that is killed doesn't wait for a store that gives no answer.
            self._thread = threading.Thread(target=self._on_thread, name="rollouts", daemon=True)
            self._thread.start()
        try:
            self._jobs.put(job, timeout=timeout)
        except queue.Full:
            log.warning("a sample of rollouts is left out: %s is too slow", self._uri)

    def _on_thread(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # whatever it is, training goes on
                known = isinstance(error, EngineError | OSError)
                fault = str(error) if known else f"{type(error).__name__}: {error}"
                kind = re.sub(r"\d+", "", fault)  # sentences name the step's file
                if kind != self._fault:  # not again for each step that has it
                    log.warning("no sample of rollouts: %s; training continues", fault)
                self._fault = kind
            else:
                self._fault = ""

    def _on_thread_write(self, samples: Sequence[Sample], history: Sequence[Metrics]) -> None:
        """Write the samples of a step, with the metrics since the last ones, and the page."""
        folder, written = SampleFolder(self._uri), dict[str, bytes]()
        if self._texts is None:
            self._texts = TokenTexts(self._load_tokenizer())
        for sample in samples:
            name, table = SampleName(sample.step, sample.split), as_table(sample, self._texts)
            metrics = [row for row in history if row["step"] > self._metrics_up_to]
            content = written[name.file] = sample_files.as_bytes(table, metrics)
            folder.write_bytes(name.file, content)
            self._add(name, table, metrics)
        if time.monotonic() >= self._page_due:
            self._write_page(folder)
            self._page_due = time.monotonic() + PAGE_SECONDS
        self._hand_over(written)

    def _on_thread_resume(self, step: int) -> None:
        """Remove samples of later steps; read those that stay."""
        folder = SampleFolder(self._uri)
        for name in folder.names():
            if name.step > step:
                folder.remove(name)
        if self._previous is not None and step > 0 and not folder.names():
            sample_files.copy_samples(self._previous, folder.uri, up_to=step)
        self._data, self._metrics_up_to = PageData(), 0
        for name in folder.names():
            self._add(name, *folder.read(name))
            self._hand_over({name.file: folder.read_bytes(name.file)})

    def _on_thread_finish(self) -> None:
        """Write the page, with the model's step, which the last sample records."""
        folder, written = SampleFolder(self._uri), dict[str, bytes]()
        for name in folder.names()[-1:] if self.model_step else ():
            table, metrics = folder.read(name)
            marked = {"step": float(name.step), MODEL_STEP: self.model_step}
            metrics = [*(row for row in metrics if MODEL_STEP not in row), marked]
            written[name.file] = sample_files.as_bytes(table, metrics)
            folder.write_bytes(name.file, written[name.file])
            self._add(name, table[:0], [marked])
        if len(self._data):
            self._hand_over(written | {sample_files.PAGE: self._write_page(folder).encode()})

    def _add(self, name: SampleName, table: pa.Table, metrics: Sequence[Metrics]) -> None:
        self._data.add(name, table, metrics)
        self._metrics_up_to = max([self._metrics_up_to, *(int(row["step"]) for row in metrics)])

    def _write_page(self, folder: SampleFolder) -> str:
        page = render_page(self._data, run_name(folder.uri))
        folder.write_bytes(sample_files.PAGE, page.encode())
        if self._on_page is not None:
            self._on_page(page)
        return page

    def _hand_over(self, files: Mapping[str, bytes]) -> None:
        if self._on_file is None:
            return
        with tempfile.TemporaryDirectory(prefix="rollouts-") as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.write_bytes(content)
                self._on_file(path)
