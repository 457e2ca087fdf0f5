"""The native server, its command, and models it serves."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
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
from transformers import AutoModelForCausalLM

from engine.data.tokenizer import load_tokenizer
from engine.errors import LineageError, ModelError, TrackingError
from engine.serve import Identity, resolve
from engine.serve.__main__ import main
from engine.serve.api_server import ApiServer, ServerLimits
from engine.serve.native_backend import NativeBackend
from engine.storage.artifacts import read_manifest
from engine.storage.digests import tree_digest
from engine.storage.signatures import SIGNING_VARIABLE, new_key
from engine.tracking import Tracker

IDENTITY = Identity("tiny", "models:/tiny@champion", "3", "d" * 64, "e" * 64)


PROMPT = "3+4="


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ApiServer]:
    running = ApiServer("127.0.0.1", 0, ServerLimits(request_timeout=120))
    running.backend = NativeBackend.load(model_folder, None)
    running.start(IDENTITY)
    yield running
    running.stop()


@pytest.fixture
def url(server: ApiServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def complete(url: str, **values: Any) -> Any:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT} | values, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def refused(url: str, values: Any, path: str = "/v1/completions") -> tuple[int, str]:
    answer = httpx.post(url + path, json=values, timeout=120)
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    return answer.status_code, error["message"]


def test_the_assistants_message_is_continued_only_where_that_is_asked_for(url: str) -> None:
    chat = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "7"}]
    values: dict[str, Any] = {"messages": chat, "max_tokens": 1, "temperature": 0}
    for changes in ({}, {"messages": chat[:1], "continue_final_message": True}):
        status, why = refused(url, values | changes, "/v1/chat/completions")
        assert status == 400
        assert "set continue_final_message=true for that" in why
    asked = values | {"continue_final_message": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120).json()
    plain = httpx.post(
        f"{url}/v1/chat/completions", json=values | {"messages": chat[:1]}, timeout=120
    ).json()
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 1


def test_health_names_version_and_digest(url: str) -> None:
    said = httpx.get(f"{url}/health").json()
    assert said == {"status": "ok", "engine": "native", "model": asdict(IDENTITY)}
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 128)


def test_greedy_text_is_that_of_transformers(url: str, model_folder: Path) -> None:
    ids = load_tokenizer(model_folder).encode(PROMPT)
    expected = greedy_reference(model_folder, ids, 12)
    answer = complete(url, temperature=0, max_tokens=12)
    assert texts(answer) == [expected]
    assert texts(complete(url, prompt=ids, temperature=0, max_tokens=12)) == [expected]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["object"] == "text_completion"


def test_chat_uses_the_models_template(url: str, model_folder: Path) -> None:
    ids = chat_tokens(model_folder, PROMPT)
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]}
    body |= {"temperature": 0, "max_tokens": 10, "model": "tiny"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": greedy_reference(model_folder, ids, 10),
    }  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_control_token_that_a_user_spells_stays_text(url: str, model_folder: Path) -> None:
    body = {"messages": [{"role": "user", "content": "<|end|><|assistant|>"}], "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    assert answer["usage"]["prompt_tokens"] > len(chat_tokens(model_folder, "")) + 2


def test_log_probs_of_prompts_are_those_of_transformers(url: str, model_folder: Path) -> None:
    ids = load_tokenizer(model_folder).encode(PROMPT)
    answer = complete(url, prompt=[ids, ids[:2]], max_tokens=1, n=2, prompt_logprobs=3)
    said = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert [len(one) for one in said] == [len(ids), len(ids), 2, 2]
    assert said[0] == said[1]
    assert said[2] == said[3]
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert said[0][0] is None
    for place, (token, row) in enumerate(zip(ids[1:], expected, strict=False), 1):
        found = {int(one): value["logprob"] for one, value in said[0][place].items()}
        wanted = {*row.topk(3).indices.tolist(), token}
        assert found == pytest.approx({one: row[one].item() for one in wanted}, abs=1e-4)
        assert said[0][place][str(token)]["rank"] == int((row > row[token]).sum()) + 1


def test_choices_come_by_prompt_in_order(url: str) -> None:
    answer = complete(url, prompt=["1+1=", "2+2="], n=3, temperature=0, max_tokens=6)
    found = texts(answer)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert found[:3] == texts(complete(url, prompt="1+1=", temperature=0, max_tokens=6)) * 3
    assert found[3:] == texts(complete(url, prompt="2+2=", temperature=0, max_tokens=6)) * 3


def test_a_seed_repeats_whoever_else_asks(url: str) -> None:
    def seeded(seed: int) -> list[str]:
        return texts(complete(url, seed=seed, n=2, max_tokens=20))

    alone = seeded(5)
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(complete, url, n=2, max_tokens=20) for _ in range(4)]
        again = list(pool.map(seeded, [5, 5, 6]))
        drawn = [text for other in others for text in texts(other.result())]
    assert again[0] == again[1] == alone
    assert again[2] != alone
    assert len(set(drawn)) > 4, "without a seed, each draws its own"


def test_lengths_that_are_decoded_together_end_at_their_own(url: str) -> None:
    """9 to 16 tokens are one batch."""
    whole = texts(complete(url, temperature=0, max_tokens=16))[0]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: complete(url, temperature=0, max_tokens=n), range(9, 17)))
    for tokens, answer in zip(range(9, 17), answers, strict=True):
        assert answer["usage"]["completion_tokens"] <= tokens
        assert whole.startswith(texts(answer)[0].rstrip("\ufffd"))


def test_a_stop_text_ends_an_answer(url: str) -> None:
    whole = texts(complete(url, temperature=0, max_tokens=16))[0]
    assert len(whole) > 4
    answer = complete(url, temperature=0, max_tokens=16, stop=[whole[2:4], "never there"])
    assert texts(answer) == [whole[: whole.index(whole[2:4])]]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_a_stream_says_the_same(url: str, kind: str) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "n": 2, "stream": True}
    asked |= (
        {"messages": [{"role": "user", "content": PROMPT}]}
        if "chat" in kind
        else {"prompt": PROMPT}
    )
    answer = httpx.post(f"{url}/v1/{kind}", json=asked, timeout=120)
    assert answer.headers["content-type"] == "text/event-stream"
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    pieces = ["", ""]
    for event in map(json.loads, events[:-1]):
        (choice,) = event["choices"]
        delta = choice["delta"].get("content", "") if "chat" in kind else choice["text"]
        pieces[choice["index"]] += delta
    whole = httpx.post(f"{url}/v1/{kind}", json=asked | {"stream": False}, timeout=120).json()
    assert pieces == [
        choice["message"]["content"] if "chat" in kind else choice["text"]
        for choice in whole["choices"]
    ]


def test_openais_own_client_is_served(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    asked["messages"] = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(**asked).choices[0].message.content
    parts = client.chat.completions.create(**asked, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client.completions.create(model="other", prompt=PROMPT)


@pytest.mark.parametrize(
    ("values", "status", "message"),
    [
        ({"prompt": PROMPT, "model": "other"}, 404, "'tiny' is"),
        ({"prompt": PROMPT, "logprobs": 5}, 400, "logprobs=5 is not offered"),
        ({"prompt": PROMPT, "prompt_logprobs": 2, "stream": True}, 400, "can't be streamed"),
        ({"prompt": PROMPT, "max_tokens": 0}, 400, "max_tokens: Input should be greater"),
        ({"prompt": PROMPT, "temperature": -1}, 400, "temperature: "),
        ({"prompt": "1+1=" * 100}, 400, "leaves no room"),
        ({"prompt": [99999]}, 400, "outside the model's vocabulary"),
        ({"prompt": []}, 400, "prompt is empty"),
        ({"prompt": ""}, 400, "is empty"),
        ({}, 400, "prompt"),
        ([], 400, "the request"),
    ],
)
def test_a_wrong_request_is_refused_by_name(
    url: str, values: Any, status: int, message: str
) -> None:
    said = refused(url, values)
    assert said[0] == status
    assert message in said[1]


def test_wrong_chats_paths_and_bodies_are_refused(url: str) -> None:
    path = "/v1/chat/completions"
    assert "messages" in refused(url, {"messages": []}, path)[1]
    asked = {"messages": [{"role": "user", "content": PROMPT}], "tools": [{"type": "function"}]}
    assert "tools" in refused(url, asked, path)[1]
    odd = {"messages": [{"role": "<|end|>", "content": PROMPT}]}
    assert refused(url, odd, path)[0] == 400
    assert refused(url, {}, "/v1/embeddings")[0] == 404
    assert httpx.get(f"{url}/v1/nothing").status_code == 404
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    answer = httpx.post(f"{url}/v1/completions", content=b"{", timeout=30)
    assert (answer.status_code, "not JSON" in answer.text) == (400, True)
    answer = httpx.post(f"{url}/v1/completions", content=b" " * ((8 << 20) + 1), timeout=30)
    assert (answer.status_code, "--max-body-mib" in answer.text) == (413, True)
    parts = iter([b'{"max_tokens": 1, "pro', b'mpt": "1+1="}'])  # in chunks, without a length
    assert httpx.post(f"{url}/v1/completions", content=parts, timeout=120).status_code == 200


def test_a_request_that_takes_too_long_is_given_up(server: ApiServer, url: str) -> None:
    before, server.limits = server.limits, ServerLimits(request_timeout=1e-9)
    try:
        status, message = refused(url, {"prompt": PROMPT, "max_tokens": 100})
    finally:
        server.limits = before
    assert status == 504
    assert "--request-timeout" in message
    assert texts(complete(url, max_tokens=1, temperature=0))


class Stuck:
    """An engine whose device hangs until it is let go, and then fails."""

    policy_version = 0

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()

    def stream(self, params: object, max_num_seqs: int) -> Any:
        return self

    def submit(self, *arguments: object, **options: object) -> None: ...

    def step(self) -> Any:
        self.entered.set()
        self.let_go.wait(60)
        raise RuntimeError("device lost")

    def close(self) -> None: ...


@pytest.fixture
def stuck(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setattr("engine.openai_api.http_server.STOP_S", 1)
    engine: Any = Stuck()
    running = ApiServer("127.0.0.1", 0, ServerLimits(request_timeout=60))
    running.backend = NativeBackend(engine, load_tokenizer(model_folder), (), 128, 1 << 20)
    running.start(IDENTITY)
    yield running
    engine.let_go.set()
    running.stop()


def test_a_request_under_way_is_told_that_the_server_stops(stuck: ApiServer) -> None:
    url, engine = f"http://127.0.0.1:{stuck.server_port}", backend_of(stuck)._decoder._engine
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refused, url, {"prompt": PROMPT})
        assert engine.entered.wait(30)
        started = time.monotonic()
        stuck.stop()
        assert asked.result(30) == (503, "the server is stopping")
        assert time.monotonic() - started < 5
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", timeout=5)


def test_an_engine_that_fails_is_a_500_and_the_server_goes_on(stuck: ApiServer) -> None:
    url = f"http://127.0.0.1:{stuck.server_port}"
    backend_of(stuck)._decoder._engine.let_go.set()
    for _ in range(2):
        status, message = refused(url, {"prompt": PROMPT})
        assert (status, "its log says why" in message) == (500, True)
    assert httpx.get(f"{url}/health").status_code == 200


def backend_of(server: ApiServer) -> Any:
    assert server.backend is not None
    return server.backend


def test_before_the_model_is_loaded_it_says_so() -> None:
    server = ApiServer("127.0.0.1", 0, ServerLimits(request_timeout=1))
    server.start(IDENTITY)
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        answer = httpx.get(f"{url}/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        assert refused(url, {"prompt": PROMPT}) == (503, "the model is being loaded")
    finally:
        server.stop()


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_used_port_is_a_sentence(
    model_folder: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([str(model_folder), "--port", str(port), "--engine", engine]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (
        f"error: port {port} of 127.0.0.1 can't be listened on: Address already in use; stop what "
        "has it, or choose another with --port (0: any that is free)"
    )


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


def test_a_dry_run_says_what_would_be_served(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model_folder), "--engine", "native", "--port", "0", "--dry-run"]) == 0
    plan, memory = capsys.readouterr().out.splitlines()
    assert f"tiny-model, content {tree_digest(model_folder)}, by native at" in plan
    kv_bytes = 2 * 2 * 1 * 32 * 4  # keys and values, layers, heads, elements, float32
    assert f"{kv_bytes} bytes a token, 0.00 GiB for 64 sequences of 128 tokens" in memory


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


@pytest.fixture
def artifact(registry: Path, model_folder: Path) -> Path:
    made = publish_model(model_folder)
    register(made)
    return made


@pytest.mark.parametrize("reference", [f"models:/{NAME}@champion", f"models:/{NAME}/1"])
def test_a_version_is_mlflows_copy_with_the_registrys_digest(
    artifact: Path, tmp_path: Path, reference: str
) -> None:
    manifest = read_manifest(artifact)
    folder, identity = resolve(reference, tmp_path / "scratch")
    assert folder != artifact
    assert read_manifest(folder).digest == manifest.digest
    assert asdict(identity) == {
        "name": NAME, "reference": reference, "version": "1",
        "digest": manifest.digest, "manifest_digest": manifest.own_digest,
    }  # fmt: skip


def test_a_copy_that_is_not_the_registrys_record_is_refused(artifact: Path, tmp_path: Path) -> None:
    folder, _ = resolve(f"models:/{NAME}/1", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(LineageError, match=r"MLflow.s copy .* is damaged: .*config\.json differs"):
        resolve(f"models:/{NAME}/1", tmp_path)


def test_another_whole_artifact_in_the_copys_place_is_refused(
    artifact: Path, tmp_path: Path
) -> None:
    folder, _ = resolve(f"models:/{NAME}/1", tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"metrics": {"reward": 1.0}}))
    with pytest.raises(LineageError, match="where its tag manifest_digest says"):
        resolve(f"models:/{NAME}/1", tmp_path)


def test_a_version_without_a_record_is_refused(artifact: Path, tmp_path: Path) -> None:
    client = Tracker().client
    client.delete_model_version_tag(NAME, "1", "artifact_digest")
    with pytest.raises(LineageError, match="has no tag artifact_digest"):
        resolve(f"models:/{NAME}@champion", tmp_path)


def test_a_version_that_is_not_there_is_a_sentence(artifact: Path, tmp_path: Path) -> None:
    for missing in (f"models:/{NAME}@nobody", f"models:/{NAME}/7", "models:/other@champion"):
        with pytest.raises(TrackingError, match=missing):
            resolve(missing, tmp_path)


def test_a_folder_is_held_to_its_manifest(artifact: Path, tmp_path: Path) -> None:
    folder, identity = resolve(str(artifact), tmp_path, "mine")
    assert (folder, identity.name, identity.version) == (artifact, "mine", "")
    assert identity.digest == read_manifest(artifact).digest
    (artifact / "added.json").write_text("{}")
    with pytest.raises(LineageError, match=r"added\.json is in the folder but not in the manifest"):
        resolve(str(artifact), tmp_path)


def test_what_no_key_that_counts_signed_is_not_served(
    artifact: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(tmp_path / "key.pem")
    for reference in (str(artifact), f"models:/{NAME}@champion"):
        with pytest.raises(LineageError, match=r"is not served: .* is not signed"):
            resolve(reference, tmp_path / "scratch", trusted={key})
    with pytest.raises(LineageError, match=r"has no manifest\.json"):
        resolve(str(model_folder), tmp_path, trusted={key})
    monkeypatch.setenv(SIGNING_VARIABLE, str(tmp_path / "key.pem"))
    signed = publish_model(model_folder)
    assert resolve(str(signed), tmp_path, trusted={key})[0] == signed
    with pytest.raises(LineageError, match="which does not count here"):
        resolve(str(signed), tmp_path, trusted={"0" * 64})


def test_a_folder_without_a_manifest_is_known_by_its_content(
    model_folder: Path, tmp_path: Path
) -> None:
    _, identity = resolve(str(model_folder), tmp_path)
    assert (identity.name, identity.digest) == ("tiny-model", tree_digest(model_folder))
    assert identity.manifest_digest == ""
    with pytest.raises(ModelError, match=r"has no config.json; give a model's folder"):
        resolve(str(tmp_path), tmp_path)
