"""What must not leave a process as it is: credentials, and control sequences for a terminal.

Messages of errors, what is printed and logged, manifests, and what MLflow gets pass through here.
Text without either stays as it is, to the byte.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_NAME = (
    r"(?:[\w.-]*[_.-])?(?:password|passwd|passphrase|secret|secret[_-]?(?:access[_-]?)?key"
    r"|api[_-]?key|access[_-]?key|private[_-]?key|account[_-]?key|credentials?|signature"
    r"|(?:auth|access|api|bearer|refresh|session|security|hf)[_-]?token)"
)
_is_secret = re.compile(rf"{_SECRET_NAME}|token|pwd|pw", re.IGNORECASE).fullmatch
# scheme://user:password@host. Digits up to a slash are a port, and an @ behind it is part of a
# path. A password may hold an @, and for SQLAlchemy a slash.
_PASSWORD = re.compile(r"(://[^\s:/@\[\"'<>]*):(?!\d+[/?#,;])[^\s\"'<>]*@")
_USER_ALONE = re.compile(r"\b(https?://)[^\s:/@\[\"'<>?#]+@")  # a token, as for git
_PARAMETER = re.compile(rf"([?&;](?:{_SECRET_NAME}|token|sig|pwd)=)[^\s&;#\"'<>]+", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""((?<![\w.-]){_SECRET_NAME}(?:=|["']\s*:\s*|:\s+(?=["'])))"""
    r"""("(?:[^"\\]|\\.)+"|'(?:[^'\\]|\\.)+'|[^\s"',;&)}\]]+)""",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)(?!\w)"
)
_AUTHORIZATION = re.compile(r"\b((?:Bearer|Basic) )[\w.~+/=-]{8,}")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # Ray's tracebacks have some
# All but new lines and tabs; also the marks that reverse the order of what a reader sees.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def redact(text: str) -> str:
    """Return `text` without passwords of URIs, values of secret settings, and known tokens.

    >>> redact("postgresql://mlflow:hunter2@db/runs?sslmode=require")
    'postgresql://mlflow:***@db/runs?sslmode=require'
    """
    text = _PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    text = _USER_ALONE.sub(rf"\1{HIDDEN}@", text)
    text = _PARAMETER.sub(rf"\1{HIDDEN}", text)
    text = _ASSIGNED.sub(_hide_assigned, text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text)


def redact_values(value: object) -> Any:
    """Return JSON values with every text redacted; a setting's name may tell that it is a secret.

    >>> redact_values({"options": {"api_key": "abc", "url": "http://a:b@c"}, "max_tokens": 5})
    {'options': {'api_key': '***', 'url': 'http://a:***@c'}, 'max_tokens': 5}
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        secret = {k for k, v in value.items() if v and isinstance(v, str) and _is_secret(str(k))}
        return {k: HIDDEN if k in secret else redact_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        values = map(redact_values, value)
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return value


def without_credentials(uri: str) -> str:
    """Return an address without user and password, for a link."""
    return re.sub(r"^([a-z][a-z0-9+.-]*://)[^/?#]*@", r"\1", uri, flags=re.IGNORECASE)


def printable(text: str) -> str:
    r"""Return `text` without colours, control characters but `\n` and `\t` as escapes: `\x1b`."""
    text = _COLOUR.sub("", text)
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def presentable(text: str) -> str:
    """Return `text` as it may be shown to people: redacted and printable."""
    return printable(redact(text))


def redact_causes(error: BaseException) -> None:
    """Redact the messages of an error's causes, which a traceback would show."""
    seen: set[int] = set()
    causes: list[BaseException | None] = [error]
    while causes:
        cause = causes.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            cause.args = redact_values(cause.args)
            causes += [cause.__cause__, cause.__context__]


def _hide_assigned(match: re.Match[str]) -> str:
    quote = match[2][0] if match[2][0] in "\"'" else ""
    return f"{match[1]}{quote}{HIDDEN}{quote}"
