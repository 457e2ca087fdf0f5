"""`python -m engine.serve` as a process: what it says, and how it ends."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import httpx
import pytest
from mlflow_server import free_port
from served import (
    NAME,
    await_status,
    await_text,
    chat_tokens,
    end,
    greedy_reference,
    publish_model,
    register,
    serve_process,
)

from engine.serve.__main__ import main
from engine.storage.artifacts import read_manifest

START_S = 300.0  # on a busy machine
END_S = 60.0  # on a busy machine; an idle one takes 4 s at most


def test_a_champion_is_served_until_sigterm(registry: Path, model_folder: Path) -> None:
    """SIGTERM ends it within seconds, also while an answer is under way."""
    artifact = publish_model(model_folder)
    register(artifact)
    port, log = free_port(), registry / "log"
    url = f"http://127.0.0.1:{port}"
    options = [f"models:/{NAME}@champion", "--engine", "native", "--port", str(port)]
    with serve_process(*options, log=log) as process:
        said = await_status(process, url, 200, START_S)
        manifest = read_manifest(artifact)
        assert said["model"]["version"] == "1"
        assert said["model"]["digest"] == manifest.digest
        body = {"prompt": "1+1=", "max_tokens": 100, "n": 64, "seed": 1}
        asking = threading.Thread(target=ask, args=(f"{url}/v1/completions", body), daemon=True)
        asking.start()
        await_text(log, "served by native")
        status, seconds = end(process, signal.SIGTERM)
        assert status == 143
        assert seconds < END_S
        asking.join(60)
    text = log.read_text()
    assert f"{url}/v1: {NAME} version 1, content {manifest.digest}, served by native" in text
    assert text.rstrip().endswith("terminated; the server has stopped")
    assert "Traceback" not in text


def ask(url: str, body: dict[str, object]) -> None:
    try:
        httpx.post(url, json=body, timeout=60)
    except httpx.TransportError:
        return  # the server ended


def test_ctrl_c_while_the_model_is_loaded_is_130(model_folder: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    options = [str(model_folder), "--engine", "native", "--port", str(port)]
    with serve_process(*options, log=log) as process:
        await_status(process, f"http://127.0.0.1:{port}", 503, START_S)
        status, seconds = end(process, signal.SIGINT)
        assert status == 130
        assert seconds < END_S
    assert log.read_text() == "interrupted; the server has stopped\n"


def test_a_changed_model_is_not_served(
    registry: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(publish_model(model_folder))
    (copy,) = (registry / "mlartifacts").rglob("model.safetensors")
    copy.write_bytes(copy.read_bytes()[:-1] + b"x")
    for engine in ("native", "vllm"):
        arguments = [f"models:/{NAME}@champion", "--port", "0", "--engine", engine]
        assert main(arguments) == 1
        (error,) = capsys.readouterr().err.splitlines()
        assert "model.safetensors differs" in error


def test_wrong_usage_is_2(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(model_folder), "--engine", "other"])
    assert ended.value.code == 2
    arguments = [str(model_folder), "--port", "0", "--engine", "native", "--", "--swap-space", "1"]
    assert main(arguments) == 1
    assert "--swap-space 1 is for vLLM" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_vllm_serves_a_champion(registry: Path, model_folder: Path) -> None:
    pytest.importorskip("vllm")
    artifact = publish_model(model_folder)
    register(artifact)
    port, log = free_port(), registry / "log"
    url = f"http://127.0.0.1:{port}"
    options = [f"models:/{NAME}@champion", "--port", str(port), "--", "--dtype", "float32"]
    with serve_process(*options, log=log) as process:
        said = await_status(process, url, 200, 900)
        assert said["engine"] == "vllm"
        assert said["model"]["version"] == "1"
        assert said["model"]["digest"] == read_manifest(artifact).digest
        ids = chat_tokens(model_folder, "3+4=")
        body = {"model": NAME, "messages": [{"role": "user", "content": "3+4="}]}
        body |= {"temperature": 0, "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
        assert answer["usage"]["prompt_tokens"] == len(ids), "words are split as it was trained"
        # vLLM keeps half a character at the end to itself.
        expected = greedy_reference(model_folder, ids, 8).rstrip("\ufffd")
        assert answer["choices"][0]["message"]["content"].rstrip("\ufffd") == expected
        status, seconds = end(process, signal.SIGTERM)
        assert status == 143
        assert seconds < 25
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", timeout=5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_vllm_that_does_not_start_says_why(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    arguments = [str(model_folder), "--port", "0", "--engine", "vllm", "--", "--no-such-option"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "vLLM's server ended with status 2 as it started" in error
    assert "--no-such-option" in error
