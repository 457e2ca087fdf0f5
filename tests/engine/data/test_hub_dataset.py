"""Datasets of the hub by address: id, revision, subset and split, over the hub's own protocol."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest

from engine.data.row_files import HubDataset, address_digest, hub_commit, parse_address
from engine.errors import DataError

COMMIT = hashlib.sha1(b"commit").hexdigest()


def test_addresses_have_four_parts() -> None:
    assert parse_address("hf://openai/gsm8k") == HubDataset("openai/gsm8k", "", "", "")
    assert parse_address("hf://a/b@v1.0:main:train[:10%]") == HubDataset(
        "a/b", "v1.0", "main", "train[:10%]"
    )
    assert parse_address("hf://squad::validation") == HubDataset("squad", "", "", "validation")
    for wrong in ("hf://", "hf://a/b/c", "hf://a b:x"):
        with pytest.raises(DataError, match=r"write hf://ID\[@REVISION\]"):
            parse_address(wrong)


def test_a_commit_needs_no_network_and_tells_data_apart() -> None:
    assert hub_commit(parse_address(f"hf://a/b@{COMMIT}")) == COMMIT
    digests = {address_digest(f"hf://a/b@{COMMIT}:{rest}") for rest in ("x:train", "x:test", "y:x")}
    assert len(digests) == 3


def parquet(*numbers: int) -> bytes:
    file = io.BytesIO()
    pd.DataFrame({"q": [f"{n}+1?" for n in numbers], "a": [n + 1 for n in numbers]}).to_parquet(
        file
    )
    return file.getvalue()


README = b"""---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train.parquet
- config_name: main
  data_files:
  - split: train
    path: main/train-*.parquet
  - split: dev
    path: main/dev.parquet
---
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as `datasets` asks for, for one dataset."""

    files: ClassVar[dict[str, bytes]] = {
        "README.md": README,
        "small/train.parquet": parquet(*range(5)),
        "main/train-0.parquet": parquet(*range(30)),
        "main/train-1.parquet": parquet(*range(30, 40)),
        "main/dev.parquet": parquet(*range(50, 58)),
    }

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = json.loads(body)["paths"] if body.startswith("{") else []
        self.reply(200, json.dumps([self.entry(name) for name in wanted if name in self.files]))

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        head, _, name = path.partition("/resolve/")
        name = name.partition("/")[2]
        if path.startswith("/api/datasets/team/sums/tree/"):
            below = path.partition("/tree/")[2].partition("/")[2]
            self.reply(200, json.dumps(self.tree(below, "recursive=True" in self.path)))
        elif path.startswith("/api/datasets/team/sums"):
            siblings = [{"rfilename": file} for file in self.files]
            info = {"id": "team/sums", "sha": COMMIT, "siblings": siblings, "tags": []}
            self.reply(200, json.dumps({**info, "private": False, "gated": False}))
        elif head == "/datasets/team/sums" and name in self.files:
            self.reply(200, self.files[name])
        else:
            self.reply(404, b"")

    def entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def tree(self, below: str, deep: bool) -> list[dict[str, Any]]:
        inside = [n for n in self.files if not below or n.startswith(f"{below}/")]
        if deep:
            return [self.entry(name) for name in inside]
        start = len(below) + 1 if below else 0
        folders = {n[:start] + n[start:].split("/")[0] for n in inside if "/" in n[start:]}
        entries = [{"type": "directory", "path": f, "oid": "0" * 40, "size": 0} for f in folders]
        return entries + [self.entry(n) for n in inside if "/" not in n[start:]]

    def reply(self, status: int, body: str | bytes) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output quiet."""


LOAD = """
import sys
from engine.config import DataConfig
from engine.data.sources import load_splits
from engine.errors import DataError
for path in sys.argv[1:]:
    config = DataConfig(
        source="files", path=path, columns={"prompt": "q", "ground_truth": "a"}, test_size=4
    )
    try:
        splits = load_splits(config, 0)
        print({name: len(frame) for name, frame in splits.frames().items()})
    except DataError as error:
        print("DataError", error)
"""


def loaded(endpoint: str, cache: Path, *paths: str) -> list[str]:
    """Run in a process of its own: the hub's address is read when its client is imported."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", LOAD, *paths]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    return run.stdout.strip().splitlines()


@pytest.mark.slow
def test_subsets_and_splits_come_from_the_hub_and_then_from_the_cache(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    pinned = f"hf://team/sums@{COMMIT}:main:train"
    try:
        found = loaded(
            endpoint,
            tmp_path / "cache",
            "team/sums:main",
            "hf://team/sums:small:train",
            pinned,
            "hf://team/nothing:main",
            "hf://team/sums:main:final",
        )
    finally:
        server.shutdown()
        server.server_close()
    sizes = {"sft_train": 36, "sft_validation": 8, "train": 36, "validation": 8, "test": 4}
    assert found[0] == str(sizes)
    assert found[1] == str(dict.fromkeys(sizes, 1) | {"sft_train": 3, "train": 3})
    assert found[2] == str(sizes | {"sft_train": 28, "train": 28})
    assert found[3].startswith("DataError the Hugging Face hub gives no dataset 'team/nothing'")
    assert found[4].startswith("DataError the dataset 'team/sums' of the hub can't be read (")
    assert loaded(endpoint, tmp_path / "cache", pinned) == [found[2]]
