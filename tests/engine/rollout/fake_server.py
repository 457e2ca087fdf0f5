"""A small HTTP server that speaks OpenAI's format and fails on demand.

Its completions are real: they are decoded by `NativeEngine` on a model of its own, which it loads
from the folders in its requests. So log-probs and versions in tests are what they say.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from rollout_models import CONTEXT
from torch import nn
from transformers import AutoModelForCausalLM

from engine.errors import RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.server import ServerEngine

_LOADING = threading.Lock()  # transformers changes torch's modules while it builds a model
Fault = Callable[["Handler"], bool]  # True: the request is dealt with


@dataclass
class FakeServer:
    """What the server is and does; tests change its fields while it runs."""

    model: nn.Module
    name: str = "policy"
    context: int = CONTEXT
    raw_log_probs: bool = False
    load_delay_s: float = 0.0
    reload_fault: Fault | None = None
    spoil: Callable[[nn.Module], Any] = lambda model: None  # what loading does wrong
    edit: Callable[[dict[str, Any]], Any] = lambda answer: answer  # last change to a completion
    faults: list[Fault] = field(default_factory=list)  # one for each next completion request
    always: Fault | None = None  # once `faults` are used up
    seen: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path, body
    headers: list[dict[str, str]] = field(default_factory=list)
    tag: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.stopping = threading.Event()

    def count(self, path: str) -> int:
        return sum(seen == path for _, seen, _ in self.seen)

    def decode(self, prompt: list[int], params: SamplingParams) -> list[Completion]:
        with self.lock:
            torch.set_num_threads(1)
            return NativeEngine(self.model, max_model_len=self.context).generate([prompt], params)

    def load(self, path: str, tag: str) -> None:
        if self.stopping.wait(self.load_delay_s):
            return
        with _LOADING:
            model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.spoil(model)
        with self.lock:
            self.model, self.tag = model, tag


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.fake.seen.append(("GET", self.path, None))
        match self.path:
            case "/v1/models":
                model = {"id": self.fake.name, "max_model_len": self.fake.context}
                self.answer({"data": [model | {"root": f"/somewhere/{self.fake.tag}"}]})
            case _:
                self.answer({"error": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"null")
        self.fake.seen.append(("POST", self.path, body))
        self.fake.headers.append(dict(self.headers))
        match self.path:
            case "/v1/completions":
                with self.fake.lock:
                    fault = self.fake.faults.pop(0) if self.fake.faults else self.fake.always
                if fault is not None and fault(self):
                    return
                try:
                    content = self.fake.edit(openai_answer(self.fake, body))
                except RolloutError:  # NaN logits, in vLLM's words
                    self.answer({"error": "Out of range float values are not JSON compliant"}, 400)
                else:
                    self.answer(content)
            case "/reload":
                if self.fake.reload_fault is not None and self.fake.reload_fault(self):
                    return
                work = threading.Thread(target=self.fake.load, args=(body["path"], body["tag"]))
                work.start()
                if not self.fake.load_delay_s:
                    work.join()
                self.answer({"status": "accepted"}, 202)
            case _:
                self.answer({"error": "Not Found"}, 404)

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        with suppress(ConnectionError):  # an engine whose deadline passed hangs up
            self.end_headers()
            self.wfile.write(data)


def sampling(body: dict[str, Any]) -> SamplingParams:
    """What a request to `/v1/completions` asks for."""
    return SamplingParams(
        n=body["n"],
        max_new_tokens=body["max_tokens"],
        temperature=body["temperature"],
        top_k=body["top_k"],
        top_p=body["top_p"],
        seed=body["seed"],
        stop_token_ids=tuple(body["stop_token_ids"]),
    )


def openai_answer(fake: FakeServer, body: dict[str, Any]) -> dict[str, Any]:
    choices = []
    for index, c in enumerate(fake.decode(body["prompt"], sampling(body))):
        log_probs = {
            "tokens": [f"token_id:{token}" for token in c.token_ids],
            "token_logprobs": raw(fake, body["prompt"], c) if fake.raw_log_probs else c.log_probs,
        }
        choice = {"index": index, "text": "", "logprobs": log_probs}
        choices.append(choice | {"finish_reason": c.finish_reason, "token_ids": c.token_ids})
    return {"choices": choices[::-1], "usage": {"prompt_tokens": len(body["prompt"])}}


@torch.no_grad()
def raw(fake: FakeServer, prompt: list[int], c: Completion) -> list[float]:
    logits = fake.model(input_ids=torch.tensor([prompt + c.token_ids])).logits[0, len(prompt) - 1 :]
    rows = logits[:-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, c.token_ids, strict=True)]


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    """Run the server until the block ends."""
    handler = type("BoundHandler", (Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        fake.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()


def connect(fake: FakeServer, model: nn.Module, **options: Any) -> ServerEngine:
    """An engine of `model` over `fake`, with pauses and deadlines that suit tests."""
    quick = {"backoff_s": 0.01, "max_retries": 2, "request_timeout_s": 20.0, "timeout_s": 30.0}
    hook = {"weights": "folder", "reload_url": "/reload"}
    if options.get("weights") == "none":
        hook = {}
    return ServerEngine(model, **quick | hook | {"url": fake.url} | options)


def status(code: int, text: str = "no", **headers: str) -> Fault:
    def fault(handler: Handler) -> bool:
        handler.answer({"error": text}, code, **headers)
        return True

    return fault


def drop(handler: Handler) -> bool:
    """Hang up without a word, as a process that is killed does."""
    handler.close_connection = True
    handler.connection.close()
    return True


def half(handler: Handler) -> bool:
    """Die in the middle of an answer."""
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    return drop(handler)


def garbled(handler: Handler) -> bool:
    """An answer of the promised length that breaks off in the middle of its JSON."""
    handler.answer(b'{"choices": [{"index": 0, "logprobs": {"tok')
    return True


def hang(handler: Handler) -> bool:
    """Take the request and never answer."""
    handler.fake.stopping.wait(60)
    return drop(handler)


def dribble(handler: Handler) -> bool:
    """Send a byte now and then, so that no pause between bytes is long."""
    handler.send_response(200)
    handler.send_header("content-length", "100000")
    handler.end_headers()
    while not handler.fake.stopping.wait(0.05):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            break
    return drop(handler)
