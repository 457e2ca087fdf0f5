"""Rows of any file as rows of ours: columns by name, templates, a system message, limits on text.

`engine.data.rl_rows` says what the canonical form is; which rows a run leaves out is in `bad_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import StrictUndefined, Template, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config import RowsConfig
from engine.data.rl_rows import canonical_row
from engine.data.rows import is_messages, is_missing
from engine.errors import ConfigError, DataError
from engine.storage.json_rows import Row

_BOXES = ("\\boxed{", "\\fbox{")
_CONVERSATIONS = ("prompt", "chosen", "rejected", "completion")  # columns of messages, or text
LONGEST_TEXT = 4_000_000  # characters of one cell: a million tokens, more than any model reads


class RowMapper:
    """Turns rows of files into canonical rows, as `data.columns` and `data.templates` say.

    >>> config = RowsConfig(columns={"prompt": "input", "ground_truth": "target"})
    >>> row = RowMapper(config)({"input": "1+1?", "target": "2"}, "d.csv, row 1")
    >>> row["prompt"], row["reward_model"]
    ([{'role': 'user', 'content': '1+1?'}], {'style': 'rule', 'ground_truth': '2'})
    """

    def __init__(self, config: RowsConfig) -> None:
        """Raise ConfigError for a template that is not one."""
        self._config = config
        sandbox = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        sandbox.filters |= {"boxed": last_boxed, "required": required}
        self._templates = {
            column: _compiled(sandbox, column, text) for column, text in config.templates.items()
        }

    def __call__(self, raw: Row, where: str) -> Row:
        """One canonical row; DataError that begins with `where` for a row that has none."""
        row = self.named(raw, where)
        if "prompt" not in row:
            raise DataError(
                f"{where}: there is no column 'prompt'; name one of {sorted(raw)} in data.columns, "
                "e.g. data.columns.prompt=question"
            )
        if self._config.data_source and is_missing(row.get("data_source")):
            row["data_source"] = self._config.data_source
        canonical = canonical_row(row, where)
        return canonical | {"prompt": self.with_system(canonical["prompt"])}

    def named(self, raw: Row, where: str) -> Row:
        """The row with our columns, whatever it holds; DataError for text that no model reads."""
        row = self._renamed(raw, where)
        row |= {c: _rendered(t, raw | row, c, where) for c, t in self._templates.items()}
        for column, value in row.items():
            _check_text(value, column, where)
        return row

    def with_system(self, prompt: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
        """The prompt, with `data.system_prompt` before it where it has no system message."""
        if not self._config.system_prompt or prompt[0]["role"] == "system":
            return prompt
        return [{"role": "system", "content": self._config.system_prompt}, *prompt]

    def _renamed(self, raw: Row, where: str) -> Row:
        """The row under our names; what is not mapped keeps its own."""
        columns = self._config.columns
        given = {}
        for ours, theirs in columns.items():
            try:
                given[ours] = _value(raw, theirs)
            except KeyError:
                raise DataError(
                    f"{where}: there is no column {theirs!r} for data.columns.{ours}; its columns "
                    f"are {sorted(raw)}"
                ) from None
        # A column that gives its name to another one is replaced by it.
        replaced = {*columns, *columns.values()}
        return {column: value for column, value in raw.items() if column not in replaced} | given


def last_boxed(text: str) -> str:
    """The filter `boxed`: what is in the last `\\boxed{…}` or `\\fbox{…}` of a text.

    Raises ValueError where there is none, or its braces don't close.
    """
    start = max(text.rfind(mark) + len(mark) if mark in text else -1 for mark in _BOXES)
    depth = 1
    for at in range(start, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
        if not depth:
            return text[start:at]
    raise ValueError("there is no \\boxed{…}")


def required(text: str, part: str) -> str:
    """The filter `required`: the text itself; ValueError where it doesn't hold `part`."""
    if part not in text:
        raise ValueError(f"there is no {part!r}")
    return text


def _value(raw: Row, path: str) -> object:
    if path in raw:
        return raw[path]
    value: object = raw
    for name in path.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(path)
        value = value[name]
    return value


def _compiled(sandbox: ImmutableSandboxedEnvironment, column: str, text: str) -> Template:
    try:
        return sandbox.from_string(text)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"data.templates.{column} is not a Jinja2 template (line {error.lineno}: "
            f"{error.message}); correct it"
        ) from None


def _rendered(template: Template, row: Row, column: str, where: str) -> str:
    try:
        return template.render(row)
    except Exception as error:  # whatever a template does with what the data hold
        reason = (str(error).strip().splitlines() or ["no reason given"])[0][:200]
        raise DataError(
            f"{where}: data.templates.{column} can't be rendered ({type(error).__name__}: "
            f"{reason}); its columns are {sorted(row)}"
        ) from error


def _check_text(value: object, column: str, where: str) -> None:
    """Refuse text that no model reads: with a NUL, or of megabytes."""
    texts = [value] if isinstance(value, str) else []
    if not texts and column in _CONVERSATIONS and is_messages(value):
        texts = [message["content"] for message in value]
    for text in texts:
        if len(text) > LONGEST_TEXT:
            raise DataError(
                f"{where}: column {column!r} has {len(text):,} characters, more than "
                f"{LONGEST_TEXT:,}; shorten or remove it"
            )
        if "\0" in text:
            raise DataError(
                f"{where}: column {column!r} has a NUL character at {text.index(chr(0))}; remove it"
            )
