"""Scores by models: behind HTTP (real servers of this test), and in this process."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from engine.config import RewardConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import RewardError
from engine.rewards import Scorer, http_rewards
from engine.rewards import model_based as reward_models
from engine.rewards.model_based import reward_model

Answer = Callable[[str, Any, int], tuple[int, Any]]  # path, request, number → status, JSON


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers by `answer`; its URL, and the requests that came."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(content | {"key": self.headers.get("Authorization", "")})
            status, body = answer(self.path, content, len(requests))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving.daemon_threads = True
    thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}", requests
    finally:
        serving.shutdown()
        thread.join()
        serving.server_close()


def scores(name: str, texts: Sequence[str], options: dict[str, Any], **columns: Any) -> list[float]:
    """By the whole way that RL goes; NaN where there is no score."""
    columns = {"ground_truth": ["4"] * len(texts)} | columns
    subject = Scorer(RewardConfig(name=name, options=options, on_error="zero", timeout_s=30.0))
    try:
        found = subject.score(["2+2?"] * len(texts), texts, columns)
    finally:
        subject.close()
    return [math.nan if i in found.failures else row[0] for i, row in enumerate(found.rows)]


# remote


def lengths(path: str, content: Any, number: int) -> tuple[int, Any]:
    return 200, {"scores": [len(text) / 4 for text in content["completions"]]}


def test_a_remote_scorer_gets_rows_and_gives_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_KEY", "k-1")
    with server(lengths) as (url, requests):
        options = {"url": url, "batch_size": 2, "api_key_env": "SCORER_KEY"}
        assert scores("remote", ["a", "bb", "cccc"], options, n=np.arange(3)) == [0.25, 0.5, 1.0]
    assert sorted(len(one["completions"]) for one in requests) == [1, 2]
    both = next(one for one in requests if len(one["completions"]) == 2)
    assert both["columns"] == {"ground_truth": ["4", "4"], "n": [0, 1]}
    assert both["prompts"] == ["2+2?", "2+2?"]
    assert both["key"] == "Bearer k-1"


def test_a_remote_scorer_may_say_that_it_doesn_t_apply() -> None:
    def some(path: str, content: Any, number: int) -> tuple[int, Any]:
        return 200, {"scores": [None if text == "?" else 0.5 for text in content["completions"]]}

    with server(some) as (url, _):
        subject = Scorer(RewardConfig(name="remote", options={"url": url}))
        found = subject.score(["q"] * 3, ["a", "?", "b"], {"ground_truth": [""] * 3})
        subject.close()
    assert {row: why.cause for row, why in found.failures.items()} == {1: "not_applicable"}
    assert found.rows == [[0.5], [0.0], [0.5]]


def test_a_remote_scorer_that_fails_for_a_while_is_asked_again() -> None:
    def shaky(path: str, content: Any, number: int) -> tuple[int, Any]:
        return (503, {}) if number < 3 else lengths(path, content, number)

    with server(shaky) as (url, requests):
        assert scores("remote", ["a"], {"url": url}) == [0.25]
    assert len(requests) == 3


def test_a_request_that_a_scorer_refuses_is_not_made_again() -> None:
    with server(lambda path, content, number: (400, {})) as (url, requests):
        assert math.isnan(scores("remote", ["a"], {"url": url, "retries": 3})[0])
    assert len(requests) == 1


def test_no_more_requests_than_the_concurrency_are_under_way() -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def counting(path: str, content: Any, number: int) -> tuple[int, Any]:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.05)
        with lock:
            under_way -= 1
        return lengths(path, content, number)

    with server(counting) as (url, _):
        options = {"url": url, "batch_size": 1, "concurrency": 2}
        assert scores("remote", ["a"] * 8, options) == [0.25] * 8
    assert most == 2


@pytest.mark.parametrize(
    "body", [(400, {}), (200, {"scores": [1.0]}), (200, [1, 2, 3]), (200, {"scores": "1234"})]
)
def test_a_remote_scorer_s_wrong_answer_costs_its_rows_alone(body: tuple[int, Any]) -> None:
    def wrong(path: str, content: Any, number: int) -> tuple[int, Any]:
        return body if "bad" in content["completions"] else lengths(path, content, number)

    with server(wrong) as (url, _):
        options = {"url": url, "batch_size": 2, "retries": 0}
        found = scores("remote", ["a", "bb", "bad", "a"], options)
    assert found[:2] == [0.25, 0.5]
    assert all(map(math.isnan, found[2:]))


def test_a_remote_scorer_that_hangs_costs_its_deadline() -> None:
    def slow(path: str, content: Any, number: int) -> tuple[int, Any]:
        time.sleep(1.0)
        return 200, {"scores": [1.0]}

    start = time.monotonic()
    with server(slow) as (url, _):
        options = {"url": url, "request_timeout_s": 0.2, "retries": 1}
        assert math.isnan(scores("remote", ["a"], options)[0])
    assert time.monotonic() - start < 20


# judge


def graded(path: str, content: Any, number: int) -> tuple[int, Any]:
    """A judge that counts the letter `x` of the answer, and says a number in between."""
    assert path == "/v1/chat/completions"
    text = content["messages"][0]["content"]
    answer = text.partition("<answer>\n")[2].partition("\n</answer>")[0]
    said = f"Not 3. Score: 99, no.\nScore: {answer.count('x')}" if answer != "silent" else "…"
    return 200, {"choices": [{"message": {"content": said}}]}


@pytest.fixture
def fresh() -> None:
    """A judge that remembers nothing."""
    http_rewards._judgements.clear()
    http_rewards._requests.clear()


@pytest.mark.usefixtures("fresh")
def test_a_judge_scores_by_a_rubric_and_asks_once(tmp_path: Path) -> None:
    with server(graded) as (url, requests):
        options = {"url": f"{url}/v1", "model": "m", "cache": str(tmp_path / "cache")}
        texts = ["xxxxx", "x" * 10, "silent", "x" * 11]
        first = scores("judge", texts, options)
        assert first[:2] == [0.5, 1.0]
        assert all(map(math.isnan, first[2:])), "without a number, or with one beyond the scale"
        text = requests[0]["messages"][0]["content"]
        assert "2+2?" in text
        assert "<reference>\n4\n</reference>" in text
        assert (requests[0]["model"], requests[0]["temperature"]) == ("m", 0.0)
        asked = len(requests)
        http_rewards._judgements.clear()
        assert scores("judge", texts[:2], options) == [0.5, 1.0]
        assert len(requests) == asked, "what the folder has is not asked again"
        assert scores("judge", texts[:1], options | {"scale": [0, 5]}) == [1.0]
        assert len(requests) == asked + 1


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("Score: 8", 0.8),
        ("Score: **8/10**", 0.8),
        ("Score: 7.5.", 0.75),
        ("Score: 8. 2 steps are wrong.", 0.8),
        ("Score: 3\nScore: 8 or 9", None),
        ("Score: 8-9", None),
        ("Score: 7,5", None),
    ],
)
def test_a_judge_s_number_is_read_as_a_whole(said: str, value: float | None) -> None:
    def judging(path: str, content: Any, number: int) -> tuple[int, Any]:
        return 200, {"choices": [{"message": {"content": said}}]}

    with server(judging) as (url, _):
        [found] = scores("judge", ["x"], {"url": f"{url}/v1", "model": "m"})
    assert found == value or (value is None and math.isnan(found))


@pytest.mark.usefixtures("fresh")
def test_a_judge_has_a_budget_and_takes_its_own_rubric() -> None:
    rubric = "Is {{ completion }} {{ colour }}?\n<answer>\n{{ completion }}\n</answer>"
    with server(graded) as (url, requests):
        options = {"url": f"{url}/v1", "model": "m", "rubric": rubric, "budget": 2}
        texts = ["x", "xx", "xxx"]
        found = scores("judge", texts, options, colour=["red", "blue", "green"])
        assert sorted(map(math.isnan, found)) == [False, False, True]
        assert len(requests) == 2
        assert {one["messages"][0]["content"].split("\n")[0] for one in requests} <= {
            "Is x red?", "Is xx blue?", "Is xxx green?",
        }  # fmt: skip
        missing = scores("judge", ["x"], options | {"budget": 0, "rubric": "{{ nothing }}"})
        assert math.isnan(missing[0])


def test_a_judge_that_can_t_work_is_refused() -> None:
    for options, said in (
        ({"url": "http://x"}, r"needs reward.options.url and .model"),
        ({"url": "http://x", "model": "m", "pattern": "("}, "is no pattern"),
        ({"url": "http://x", "model": "m", "pattern": "a"}, "no group"),
        ({"url": "http://x", "model": "m", "rubric": "{{"}, "no Jinja2 template"),
    ):
        config = RewardConfig(name="judge", options=options, on_error="fail")
        with pytest.raises(RewardError, match=said):
            Scorer(config).score(["a"], ["b"], {"ground_truth": ["c"]})


# reward model


@pytest.fixture(scope="module")
def classifier(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with one logit, and the tokenizer of the tiny policy."""
    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = load_tokenizer(tiny_folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_labels=1, initializer_range=0.5, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForSequenceClassification(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_reward_model_scores_conversations_in_any_batch_size(classifier: Path) -> None:
    texts = ["4", "four, which is 2+2", "", "5"]
    options = {"model": str(classifier), "batch_size": 3}
    found = scores("reward_model", texts, options)
    alone = [scores("reward_model", [text], options)[0] for text in texts]
    assert found == pytest.approx(alone, abs=1e-4)
    assert len(set(found)) == len(texts)
    model = LlamaForSequenceClassification.from_pretrained(classifier)
    tokenizer = load_tokenizer(classifier)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        assert found[0] == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-4)
    system = [[{"role": "system", "content": "short"}, {"role": "user", "content": "2+2?"}]]
    assert scores("reward_model", ["4"], options, messages=system)[0] != pytest.approx(found[0])


def test_a_completion_can_t_write_control_tokens_for_a_reward_model(classifier: Path) -> None:
    loaded = reward_models.load_scoring_model("SequenceClassification", str(classifier), "", "")
    end, end_id = loaded.tokenizer.eos_token, loaded.tokenizer.eos_token_id
    ids = loaded.tokens([{"role": "user", "content": f"2+2?{end}"}], f"4{end}{end}")
    clean = loaded.tokens([{"role": "user", "content": "2+2?"}], "4")
    assert ids.count(end_id) == clean.count(end_id)
    assert len(ids) > len(clean)


def test_of_a_long_conversation_a_reward_model_reads_the_end(classifier: Path) -> None:
    model = str(classifier)
    first, second = (reward_model([p + "2+2?"], ["4"], model=model, max_length=6) for p in "ab")
    assert first == second
    assert first != reward_model(["2+2?"], ["5"], model=model, max_length=6)


def test_a_reward_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for options, said in (({}, "needs reward.options.model"), ({"model": str(tmp_path)}, "loaded")):
        with pytest.raises(RewardError, match=said):
            reward_model(["a"], ["b"], **options)
