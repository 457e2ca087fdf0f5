"""`python -m engine.export MODEL --to hf://…` against a server that speaks the hub's endpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, hub_server
from huggingface_hub import ModelCard, close_session, constants
from release_store import make_run

from engine.cli.commands.export import main
from engine.storage.artifacts import read_manifest

REPOSITORY = "acme/math"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        yield server
    close_session()


def push(model: Path, *more: str, to: str = REPOSITORY) -> int:
    return main([str(model), "--to", f"hf://{to}", *more])


def test_the_command_uploads_a_model_in_one_commit(hub: Hub, tmp_path: Path) -> None:
    """In a process of its own, by the environment alone."""
    made = make_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "engine.export", str(made.rl), "--to", f"hf://{REPOSITORY}",
         "--private"],
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    digest = read_manifest(made.rl).digest
    assert done.stdout.startswith(f"{hub.url}/{REPOSITORY}/commit/")
    assert digest in done.stdout
    files = hub.files[f"{REPOSITORY}@main"]
    assert files["model.safetensors"] == b"better"
    assert {"README.md", "lineage.json", "config.json", "tokenizer.json"} < files.keys()
    assert not {"metrics.parquet", "rollouts/rollouts.html"} & files.keys()
    assert hub.commits[0] == {"created": REPOSITORY, "visibility": "private"}
    (commit,) = hub.commits[1:]
    assert digest[:16] in commit["summary"]
    card = ModelCard(files["README.md"].decode())
    assert card.data.eval_results[0].metric_value == 0.973
    assert f'from_pretrained("{REPOSITORY}")' in card.text


def test_weights_of_an_earlier_model_go_and_other_files_stay(hub: Hub, tmp_path: Path) -> None:
    hub.files[f"{REPOSITORY}@main"] = {
        ".gitattributes": b"", "curve.png": b"picture", "README.md": b"old",
        "model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"old",
    }  # fmt: skip
    made = make_run(tmp_path)
    assert push(made.rl) == 0
    files = hub.files[f"{REPOSITORY}@main"]
    assert files["curve.png"] == b"picture"
    assert files["README.md"].startswith(b"---\n")
    assert [name for name in files if "0000" in name or "index" in name] == []


def test_a_branch_is_made_and_main_stays(hub: Hub, tmp_path: Path) -> None:
    hub.files[f"{REPOSITORY}@main"] = {"README.md": b"main's"}
    assert push(make_run(tmp_path).rl, to=f"{REPOSITORY}@candidate") == 0
    assert hub.files[f"{REPOSITORY}@main"] == {"README.md": b"main's"}
    assert hub.files[f"{REPOSITORY}@candidate"]["model.safetensors"] == b"better"


@pytest.mark.parametrize("refused", ["/preupload/", "/lfs/", "/commit/"])
def test_a_refusal_leaves_the_repository_as_it_was(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: str
) -> None:
    hub.files[f"{REPOSITORY}@main"] = {"README.md": b"before"}
    hub.refuse = refused
    assert push(make_run(tmp_path).rl) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert "403" in error
    assert "nothing was committed" in error
    assert hub.files[f"{REPOSITORY}@main"] == {"README.md": b"before"}


def test_a_commit_of_somebody_else_in_between_refuses_ours(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files[f"{REPOSITORY}@main"] = {"README.md": b"before"}
    hub.commit_in_between = True
    assert push(make_run(tmp_path).rl) == 1
    assert "412" in capsys.readouterr().err
    assert hub.files[f"{REPOSITORY}@main"]["README.md"] == b"before"


def test_a_wrong_token_is_said(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "w" * 30)
    assert push(make_run(tmp_path).rl) == 1
    error = capsys.readouterr().err
    assert "401" in error
    assert "w" * 30 not in error
    assert hub.files == {}


def test_an_unknown_licence_of_the_base_is_not_published(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(tmp_path, start=f"acme/base@{'c' * 40}")
    assert push(made.rl) == 1
    assert "the licence of `acme/base`" in capsys.readouterr().err
    assert hub.files == {}
    hub.cards["acme/base"] = {"license": "apache-2.0"}
    hub.files[f"acme/base@{'c' * 40}"] = {}
    assert push(made.rl) == 0
    card = ModelCard(hub.files[f"{REPOSITORY}@main"]["README.md"].decode())
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "acme/base")
