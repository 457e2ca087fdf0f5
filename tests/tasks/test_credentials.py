"""Credentials by Flyte's secrets: what tasks ask for, and what a pod makes of them."""

from __future__ import annotations

import os

import pytest

from engine.errors import ConfigError
from tasks import host
from tasks.flytekit_setup import (
    VARIABLE,
    SecretName,
    load_secrets,
    of_registration,
    read_secrets,
    with_secrets,
)
from tasks.host import StageError, flyte_host

TEXT = "MLFLOW_TRACKING_TOKEN=team/mlflow, HF_TOKEN=team/hub,WANDB_API_KEY=team/wandb"


def test_names_are_read_and_values_refused() -> None:
    assert read_secrets(TEXT)["HF_TOKEN"] == SecretName("team", "hub")
    assert read_secrets("") == {}
    for wrong in ("HF_TOKEN=hf_abcdef", "HF_TOKEN", "hf-token=a/b", "HF_TOKEN=a/b/c"):
        with pytest.raises(ConfigError, match=r"is no VARIABLE=GROUP/KEY; give the variable"):
            read_secrets(wrong)
    with pytest.raises(ConfigError, match="names HF_TOKEN twice"):
        read_secrets("HF_TOKEN=a/b,HF_TOKEN=a/c")


def test_a_task_asks_for_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert with_secrets("hub", "loggers") == {}, "by default nothing changes"
    monkeypatch.setenv(VARIABLE, TEXT)
    asked = {
        needs: [one.env_var for one in with_secrets(*needs)["secret_requests"]]
        for needs in ((), ("hub",), ("hub", "loggers"))
    }
    assert asked == {
        (): ["MLFLOW_TRACKING_TOKEN"],
        ("hub",): ["MLFLOW_TRACKING_TOKEN", "HF_TOKEN"],
        ("hub", "loggers"): ["MLFLOW_TRACKING_TOKEN", "HF_TOKEN", "WANDB_API_KEY"],
    }
    assert with_secrets()["environment"] == {VARIABLE: "MLFLOW_TRACKING_TOKEN=team/mlflow"}
    assert of_registration()[VARIABLE] == TEXT


def test_a_pod_finds_them_and_what_is_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ[VARIABLE] = "FIRST=team/one,SECOND=team/two"
    os.environ["FIRST"] = "of the pod"
    os.environ["_FSEC_TEAM_ONE"], os.environ["_FSEC_TEAM_TWO"] = "1", "2"  # as Flyte injects them
    load_secrets()
    assert (os.environ["FIRST"], os.environ["SECOND"]) == ("of the pod", "2")


def test_a_missing_secret_ends_in_a_sentence_only_in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ[VARIABLE] = "THIRD=team/three"
    with flyte_host():  # on a laptop variables are what they are
        assert "THIRD" not in os.environ
    monkeypatch.setattr(host, "on_cluster", lambda: True)
    with (
        pytest.raises(StageError, match=r"team/three for THIRD is not in this pod; create it"),
        flyte_host(),
    ):
        raise AssertionError("not reached")
