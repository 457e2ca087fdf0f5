"""Credentials go, wherever they stand in a text or value; whatever holds none stays as it is."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.redaction import (
    presentable,
    printable,
    redact,
    redact_causes,
    redact_values,
    without_credentials,
)

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://mlflow:hunter2@db:5432/x", "postgresql://mlflow:***@db:5432/x"),
        ("mysql+pymysql://me:hu@nter2/x@db/x", "mysql+pymysql://me:***@db/x"),
        ("redis://:hunter2@cache", "redis://:***@cache"),
        ("['https://a:hunter2@b','https://c:hunter2@d']", "['https://a:***@b','https://c:***@d']"),
        ("git+https://hunter2@host/x", "git+https://***@host/x"),
        ("h/x?X-Amz-Signature=hunter2&y=1&sig=hunter2", "h/x?X-Amz-Signature=***&y=1&sig=***"),
        ("rl.reward.options.judge_api_key=hunter2, x", "rl.reward.options.judge_api_key=***, x"),
        ("AWS_SECRET_ACCESS_KEY=hunter2", "AWS_SECRET_ACCESS_KEY=***"),
        ("{'password': 'hun\\'ter2', 'n': 1}", "{'password': '***', 'n': 1}"),
        ('{"auth_token": "hunter2"}', '{"auth_token": "***"}'),
        ("Authorization: Bearer hunter2-hunter2", "Authorization: Bearer ***"),
        ("key hf_hunter2hunter2hunter2hunter2 is bad", "key *** is bad"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
    ],
)  # fmt: skip
def test_a_credential_in_a_text_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "docker://registry:5000/image@sha256:ab",
        "http://127.0.0.1:5000/#/experiments/1, ask ops@example.com",
        "http://[::1]:5000/a@b",
        "models:/hybridflyte-policy@champion",
        "Qwen/Qwen2.5-0.5B@main",
        "sqlite:////home/me@work/mlflow.db",
        "s3://bucket/dt=2026-11-20/x:y@z.parquet",
        "eos_token='<|endoftext|>', max_tokens=5, pad_token_id=0",
        "the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)",
        "password: authentication failed",
        "risk-averse-task-scheduling-with-tokens",
    ],
)
def test_a_text_without_credentials_stays(text: str) -> None:
    assert redact(text) == text
    assert presentable(text) == text


def test_a_settings_name_tells_that_its_value_is_secret() -> None:
    values = {
        "options": {"api_key": SECRET, "token": SECRET, "max_tokens": 5, "api_key_env": "JUDGE"},
        "urls": ("http://a:hunter2@b", "http://c"),
        "password": "",
        "eos_token": "<eos>",
    }
    assert redact_values(values) == {
        "options": {"api_key": "***", "token": "***", "max_tokens": 5, "api_key_env": "JUDGE"},
        "urls": ("http://a:***@b", "http://c"),
        "password": "",
        "eos_token": "<eos>",
    }


class Connection(NamedTuple):
    """As an error of aiohttp carries one."""

    url: str
    port: int


def test_a_named_tuple_stays_one() -> None:
    assert redact_values(Connection("http://a:b@c", 80)) == Connection("http://a:***@c", 80)


def test_a_link_has_no_user() -> None:
    assert without_credentials("https://me:hunter2@host:5/x@y") == "https://host:5/x@y"
    assert without_credentials("https://host/x@y") == "https://host/x@y"


@given(st.text())
def test_no_control_sequence_is_left(text: str) -> None:
    shown = printable(text)
    assert not any((c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" for c in shown)
    assert printable(shown) == shown


def test_control_sequences_are_shown_and_colours_go() -> None:
    assert printable("\x1b]0;title\x07 a\rb\n\tü\u202e") == "\\x1b]0;title\\x07 a\\rb\n\tü\\u202e"
    assert printable("\x1b[36mray::work()\x1b[39m") == "ray::work()"


def test_an_error_holds_neither_and_its_causes_can_be_cleaned() -> None:
    error = ConfigError("path='https://me:hunter2@host'\x1b[2J")
    error.__cause__ = ValueError("https://me:hunter2@host")
    redact_causes(error)
    assert str(error) == "path='https://me:***@host'\\x1b[2J"
    assert str(error.__cause__) == "https://me:***@host"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
