"""Models on the hub: the commit that a name stands for, and that this commit is what is loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import close_session, constants, hf_api
from transformers import AutoModelForCausalLM

from engine.config import LoRAConfig
from engine.data.tokenizer import load_tokenizer
from engine.errors import ModelError
from engine.models import load_policy_model, text_config, vocabulary_and_context
from engine.models.loading import adapter_base_path
from engine.models.lora import save_adapter
from engine.storage.filesystem import is_hub_id, pin_revision, split_revision

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


Use = Callable[[str, Path], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """`use(endpoint, cache)`: the hub's client, which reads both when imported, asks there."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def use(endpoint: str, cache: Path) -> None:
        close_session()  # which has read the proxies
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(hf_api.api, "endpoint", endpoint)

    yield use
    close_session()


def test_a_name_has_the_commit_of_its_branch_and_that_is_loaded(
    hub: Hub, use: Use, tmp_path: Path
) -> None:
    out = tmp_path / "adapter"
    use(hub.endpoint, tmp_path / "cache")
    first = pin_revision("team/tiny")
    assert first == f"team/tiny@{FIRST}"
    hub.main = SECOND  # a push
    assert pin_revision("team/tiny@main") == f"team/tiny@{SECOND}"
    model = load_policy_model(first, "float32", LoRAConfig(rank=2))
    norm = next(weight for name, weight in model.named_parameters() if "norm" in name)
    assert float(norm.mean()) == pytest.approx(1.0), "not what the branch has now"
    save_adapter(model, out)
    assert adapter_base_path(out) == first, "adapters name the commit that they belong to"
    assert vocabulary_and_context(first)[0] == model.config.vocab_size
    assert len(load_tokenizer(first)) > 0
    assert pin_revision(first) == first


def test_without_the_hub_its_cache_says_which(hub: Hub, use: Use, tmp_path: Path) -> None:
    use(hub.endpoint, tmp_path / "cache")
    first = pin_revision("team/tiny")
    with pytest.raises(ModelError, match=r"^model\.path='team/nothing' is no folder"):
        pin_revision("team/nothing")
    nowhere = "http://127.0.0.1:9"
    use(nowhere, tmp_path / "cache")
    assert pin_revision("team/tiny") == first
    use(nowhere, tmp_path / "empty")
    with pytest.raises(ModelError, match=r"^model\.path='team/tiny' is no folder, and") as caught:
        pin_revision("team/tiny")
    assert "neither the Hugging" in str(caught.value)
    assert "check the name, the network and HF_TOKEN, or give a folder" in str(caught.value)


def test_folders_are_no_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team" / "tiny@2").mkdir(parents=True)
    assert not is_hub_id("team/tiny@2")
    assert split_revision("team/tiny@2") == ("team/tiny@2", None)
    assert split_revision("team/other@refs/pr/2") == ("team/other", "refs/pr/2")
    assert split_revision("/models/a@b") == ("/models/a@b", None)


MISSING = r"'{}' does not exist; give a folder written by .* or a hub id \(owner/name\)$"


@pytest.mark.parametrize("load", [pin_revision, load_tokenizer, text_config])
def test_a_folder_that_is_missing_is_not_asked_of_the_hub(load: Callable[[str], object]) -> None:
    for path in ("nope", "/nowhere/model", "./a/b", "models/of/mine"):
        with pytest.raises(ModelError, match=MISSING.format(path)):
            load(path)
