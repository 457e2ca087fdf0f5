"""A small server of the hub's endpoints that an upload of a model asks, over HTTP."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_" + "t" * 30
_BODY = re.compile(r"^---\n(.*?)\n---\n", re.DOTALL)


@dataclass
class Hub:
    """Repositories by name: their files by branch, and their commits."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # "owner/name@branch"
    commits: list[dict[str, Any]] = field(default_factory=list)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)  # of models that are there
    lfs: dict[str, bytes] = field(default_factory=dict)
    refuse: str = ""  # a path with this in it is answered with 403
    commit_in_between: bool = False

    def sha(self, place: str) -> str:
        """The commit that a branch is on."""
        names = json.dumps({k: hashlib.sha1(v).hexdigest() for k, v in self.files[place].items()})
        return hashlib.sha1(f"{place}{names}{len(self.commits)}".encode()).hexdigest()


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub without repositories, for the block."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/?]+))?", self.path)
        if not found:
            self._answer(404, {"error": "no such page"})
            return
        name, branch = found[1], found[2] or "main"
        card = self.state.cards.get(name)
        place = f"{name}@{branch}"
        if card is None and place not in self.state.files:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        values: dict[str, Any] = {"id": name, "modelId": name, "tags": []}
        if card is not None:
            values["cardData"] = card
        if place in self.state.files:
            values["sha"] = self.state.sha(place)
            values["siblings"] = [{"rfilename": file} for file in self.state.files[place]]
            if self.state.commit_in_between:
                self.state.files[place]["note.txt"] = b"somebody else's"
        self._answer(200, values)

    def do_PUT(self) -> None:
        data = self._body()
        if hashlib.sha256(data).hexdigest() == self.path.rsplit("/", 1)[-1]:
            self.state.lfs[hashlib.sha256(data).hexdigest()] = data
            self._answer(200, {})
        else:
            self._answer(400, {"error": "other content"})

    def do_POST(self) -> None:
        body, state = self._body(), self.state
        if self.path != "/api/validate-yaml":
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._answer(401, {"error": "Invalid username or password."})
                return
            if state.refuse and state.refuse in self.path:
                self._answer(403, {"error": "Forbidden: the token has no write access"})
                return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            there = f"{name}@main" in state.files
            state.files.setdefault(f"{name}@main", {".gitattributes": b""})
            state.commits.append({"created": name, "visibility": asked.get("visibility")})
            self._answer(409 if there else 200, {"url": f"{state.url}/{name}"})
        elif self.path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", self.path):
            state.files.setdefault(f"{found[1]}@{found[2]}", dict(state.files[f"{found[1]}@main"]))
            self._answer(200, {})
        elif "/preupload/" in self.path:
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{state.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/?]+)", self.path):
            self._commit(f"{found[1]}@{found[2]}", [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": "no such page"})

    def _validate(self, card: str) -> None:
        """As the hub does: the front matter must be YAML with results that are whole."""
        errors = []
        try:
            values = yaml.safe_load(_BODY.match(card)[1])  # type: ignore[index]
            for entry in values.get("model-index", []):
                for result in entry["results"]:
                    _ = result["task"]["type"], result["dataset"]["name"], result["dataset"]["type"]
                    _ = [(metric["type"], metric["value"]) for metric in result["metrics"]]
        except (yaml.YAMLError, KeyError, TypeError) as error:
            errors.append({"message": repr(error)})
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _commit(self, place: str, lines: list[dict[str, Any]]) -> None:
        state, header = self.state, lines[0]["value"]
        if header.get("parentCommit") != state.sha(place):
            self._answer(412, {"error": "A commit has happened since. Please try again."})
            return
        files = dict(state.files[place])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = state.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        state.files[place] = files
        state.commits.append({"place": place, "summary": header["summary"]})
        name = place.partition("@")[0]
        oid = state.sha(place)
        self._answer(
            200,
            {"success": True, "commitUrl": f"{state.url}/{name}/commit/{oid}", "commitOid": oid},
        )

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, values: object, more: dict[str, str] | None = None) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
