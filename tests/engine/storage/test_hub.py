"""Models on the hub: the commit that a name stands for, and that this commit is what is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.data.tokenizer import load_tokenizer
from engine.errors import ModelError
from engine.models import text_config
from engine.storage.hub import is_hub_id, pin_revision, split_revision

FIRST, SECOND = (hashlib.sha1(name).hexdigest() for name in (b"first", b"second"))


@dataclass
class Hub:
    """As much of the Hugging Face hub as one model asks for: its commits, and a branch on one."""

    commits: dict[str, Path]
    main: str
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)

    def commit_of(self, revision: str) -> str:
        return self.main if revision == "main" else revision

    def handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                hub.asked.append(path)
                if path in ("/api/models/team/tiny", "/api/models/team/tiny/revision/main"):
                    self.reply(json.dumps({"id": "team/tiny", "sha": hub.main}).encode(), hub.main)
                    return
                head, _, rest = path.partition("/resolve/")
                revision, _, name = rest.partition("/")
                commit = hub.commit_of(revision)
                file = hub.commits.get(commit, Path("/nonexistent")) / name
                if head == "/team/tiny" and file.is_file():
                    self.reply(file.read_bytes(), commit)
                else:
                    self.reply(b"", commit, 404)

            def reply(self, body: bytes, commit: str, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", hashlib.sha1(body).hexdigest())
                self.send_header("X-Repo-Commit", commit)
                if status == 404:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test's output quiet."""

        return Handler


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path) -> Iterator[Hub]:
    """A hub whose `team/tiny` has two commits of other weights; `main` is on the first."""
    second = tmp_path / "second"
    shutil.copytree(tiny_folder, second)
    model = AutoModelForCausalLM.from_pretrained(second)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    model.save_pretrained(second)
    found = Hub({FIRST: tiny_folder, SECOND: second}, FIRST)
    server = ThreadingHTTPServer(("127.0.0.1", 0), found.handler())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    server.server_close()


PIN = """
import sys
from engine.errors import ModelError
from engine.storage.hub import pin_revision
for name in sys.stdin:
    try:
        print(pin_revision(name.strip()), flush=True)
    except ModelError as error:
        print("ModelError", error, flush=True)
"""
LOAD = """
import sys
from engine.config import LoRAConfig
from engine.data.tokenizer import load_tokenizer
from engine.models import load_policy_model, vocabulary_and_context
from engine.models.load import adapter_base_path
from engine.models.lora import save_adapter
from pathlib import Path
path, out = sys.stdin.readline().strip(), Path(sys.argv[1])
model = load_policy_model(path, "float32", LoRAConfig(rank=2))
save_adapter(model, out)
assert vocabulary_and_context(path)[0] == model.config.vocab_size
assert len(load_tokenizer(path)) > 0
norm = next(p for n, p in model.named_parameters() if "norm" in n)
print(adapter_base_path(out), norm.mean().item(), flush=True)
"""
Ask = Callable[[str], str]


@contextlib.contextmanager
def asking(code: str, endpoint: str, cache: Path, *arguments: str) -> Iterator[Ask]:
    """`ask(line)` of a process of its own: the hub's client reads its address when imported."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout

        def ask(line: str) -> str:
            print(line, file=to, flush=True)
            return answers.readline().strip()

        yield ask
        to.close()
        assert process.wait(400) == 0


def test_a_name_has_the_commit_of_its_branch_and_that_is_loaded(hub: Hub, tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "adapter"
    with asking(PIN, hub.endpoint, cache) as pinned:
        first = pinned("team/tiny")
        assert first == f"team/tiny@{FIRST}"
        hub.main = SECOND  # a push
        assert pinned("team/tiny@main") == f"team/tiny@{SECOND}"
    with asking(LOAD + PIN, hub.endpoint, cache, str(out)) as loaded_then_pinned:
        base, mean = loaded_then_pinned(first).split()
        assert base == first, "adapters name the commit that they belong to"
        assert float(mean) == pytest.approx(1.0), "not what the branch has now"
        assert loaded_then_pinned(first) == first


def test_without_the_hub_its_cache_says_which(hub: Hub, tmp_path: Path) -> None:
    with asking(PIN, hub.endpoint, tmp_path / "cache") as pinned:
        first = pinned("team/tiny")
        assert pinned("team/nothing").startswith("ModelError model.path='team/nothing'")
    nowhere = "http://127.0.0.1:9"
    with asking(PIN, nowhere, tmp_path / "cache") as pinned:
        assert pinned("team/tiny") == first
    with asking(PIN, nowhere, tmp_path / "empty") as pinned:
        said = pinned("team/tiny")
    assert said.startswith(
        "ModelError model.path='team/tiny' is no folder, and neither the Hugging"
    )
    assert "check the name, the network and HF_TOKEN, or give a folder" in said


def test_folders_are_no_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team" / "tiny@2").mkdir(parents=True)
    assert not is_hub_id("team/tiny@2")
    assert split_revision("team/tiny@2") == ("team/tiny@2", None)
    assert split_revision("team/other@refs/pr/2") == ("team/other", "refs/pr/2")
    assert split_revision("/models/a@b") == ("/models/a@b", None)


@pytest.mark.parametrize("load", [pin_revision, load_tokenizer, text_config])
def test_a_folder_that_is_missing_is_not_asked_of_the_hub(load: Callable[[str], object]) -> None:
    for path in ("nope", "/nowhere/model", "./a/b", "models/of/mine"):
        with pytest.raises(ModelError, match=f"{path!r} does not exist; give a folder"):
            load(path)
