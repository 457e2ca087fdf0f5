"""What is set up around flytekit: Ctrl-C, literal types, branches, secrets."""

from __future__ import annotations

import logging
import os
import signal

import pytest
from flytekit import FlyteContextManager, conditional, task, workflow
from flytekit.core.type_engine import TypeEngine
from flytekit.loggers import logger
from pydantic import BaseModel, JsonValue

from engine.errors import ConfigError
from engine.stages.pods import SECRETS, read_secrets, registration_environment
from tasks import host
from tasks.flytekit_setup import load_secrets, with_secrets
from tasks.host import StageError, flyte_host

# Ctrl-C in a process that loads our tasks.


def test_ctrl_c_ends_with_130() -> None:
    def as_flytekit(number: int, frame: object) -> None:
        for handler in FlyteContextManager.signal_handlers:
            handler(number, frame)
        raise AssertionError("flytekit would exit with 1")

    before = signal.signal(signal.SIGINT, as_flytekit)
    try:
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130


# Literal types of our pydantic models: derived once, and without flytekit's warnings.


class WithFieldsOfNoType(BaseModel):
    """What Flyte has no type for travels in the model's JSON."""

    options: dict[str, JsonValue] = {}
    names: tuple[str, ...] = ()


def test_a_literal_type_is_derived_once_without_a_warning() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        first = TypeEngine.to_literal_type(WithFieldsOfNoType)
        assert TypeEngine.to_literal_type(WithFieldsOfNoType) is first
        assert logger.level == logging.WARNING
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert said == []
    assert first.metadata is not None


# A branch inside the sub-workflow of a branch, run locally.

ran: list[str] = []


@task
def step(name: str) -> str:
    ran.append(name)
    return name


@workflow
def inner(which: str) -> str:
    chosen = (
        conditional("inner")
        .if_(which == "a")
        .then(step(name="a"))
        .elif_(which == "b")
        .then(step(name="b"))
        .else_()
        .fail("neither")
    )
    after = step(name="after")
    chosen >> after
    return after


@workflow
def outer(go: bool, which: str) -> str:
    return (
        conditional("outer")
        .if_(go.is_true())
        .then(inner(which=which))
        .else_()
        .then(step(name="skipped"))
    )


def run(go: bool, which: str) -> tuple[str, list[str]]:
    ran.clear()
    return outer(go=go, which=which), list(ran)


def test_what_follows_the_inner_branch_is_run() -> None:
    assert run(True, "a") == ("after", ["a", "after"])


def test_only_the_chosen_case_is_run() -> None:
    assert run(True, "b") == ("after", ["b", "after"])


def test_nothing_of_a_branch_that_is_not_taken_is_run() -> None:
    assert run(False, "a") == ("skipped", ["skipped"])


# Credentials by Flyte's secrets: what tasks ask for, and what a pod makes of them.

TEXT = "MLFLOW_TRACKING_TOKEN=team/mlflow, HF_TOKEN=team/hub,WANDB_API_KEY=team/wandb"


def test_names_are_read_and_values_refused() -> None:
    secret = read_secrets(TEXT)["HF_TOKEN"]
    assert (secret.group, secret.key) == ("team", "hub")
    assert read_secrets("") == {}
    for wrong in ("HF_TOKEN=hf_abcdef", "HF_TOKEN", "hf-token=a/b", "HF_TOKEN=a/b/c"):
        with pytest.raises(ConfigError, match=r"is no VARIABLE=GROUP/KEY; give the variable"):
            read_secrets(wrong)
    with pytest.raises(ConfigError, match="names HF_TOKEN twice"):
        read_secrets("HF_TOKEN=a/b,HF_TOKEN=a/c")


def test_a_task_asks_for_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRETS, raising=False)
    assert with_secrets("hub", "loggers") == {}, "by default nothing changes"
    monkeypatch.setenv(SECRETS, TEXT)
    asked = {
        needs: [one.env_var for one in with_secrets(*needs)["secret_requests"]]
        for needs in ((), ("hub",), ("hub", "loggers"))
    }
    assert asked == {
        (): ["MLFLOW_TRACKING_TOKEN"],
        ("hub",): ["MLFLOW_TRACKING_TOKEN", "HF_TOKEN"],
        ("hub", "loggers"): ["MLFLOW_TRACKING_TOKEN", "HF_TOKEN", "WANDB_API_KEY"],
    }
    assert with_secrets()["environment"] == {SECRETS: "MLFLOW_TRACKING_TOKEN=team/mlflow"}
    assert registration_environment()[SECRETS] == TEXT


def test_a_pod_finds_them_and_what_is_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ[SECRETS] = "FIRST=team/one,SECOND=team/two"
    os.environ["FIRST"] = "of the pod"
    os.environ["_FSEC_TEAM_ONE"], os.environ["_FSEC_TEAM_TWO"] = "1", "2"  # as Flyte injects them
    load_secrets()
    assert (os.environ["FIRST"], os.environ["SECOND"]) == ("of the pod", "2")


def test_a_missing_secret_ends_in_a_sentence_only_in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ[SECRETS] = "THIRD=team/three"
    with flyte_host():  # on a laptop variables are what they are
        assert "THIRD" not in os.environ
    monkeypatch.setattr(host, "on_cluster", lambda: True)
    with (
        pytest.raises(StageError, match=r"team/three for THIRD is not in this pod; create it"),
        flyte_host(),
    ):
        raise AssertionError("not reached")
