"""A local hub with the part of the Hugging Face hub's API that fetching a model needs."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

NEVER = {
    "README.md": b"# A model",
    "pytorch_model.bin": b"a pickle",
    "pytorch_model-00001-of-00002.bin": b"a pickle",
    "modeling_own.py": b"raise SystemExit('run')",
    "consolidated.safetensors": b"the same in another format",
    "model.pt": b"a pickle",
    "picture.png": b"a picture",
}
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@dataclasses.dataclass
class FakeHub:
    """Serves the files of models, and records all requests.

    Attributes:
        models: The files of each model, by "org/name".
        refuse: The status and the X-Error-Code to answer with, by model or file.
        cut: The number of bytes after which the connection ends, once, by file.
        asked: The method, path and headers of each request.
        stalls: Files of which the hub sends only half, then sets `stalled` and waits.
    """

    models: dict[str, dict[str, bytes]]
    refuse: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    cut: dict[str, int] = dataclasses.field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = dataclasses.field(default_factory=list)
    stalls: set[str] = dataclasses.field(default_factory=set)
    stalled: threading.Event = dataclasses.field(default_factory=threading.Event)
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    endpoint: str = ""

    def got(self) -> list[str]:
        """The files whose contents were requested."""
        found = (path for how, path, _ in self.asked if how == "GET" and "/resolve/" in path)
        return sorted({path.rpartition("/")[2] for path in found})

    def revisions(self, file: str) -> set[str]:
        """The revisions under which a file was requested."""
        return {p.split("/")[-2] for _, p, _ in self.asked if p.endswith(f"/{file}")}

    @contextlib.contextmanager
    def served(self) -> Iterator["FakeHub"]:
        hub = self

        class Handler(_Handler):
            fake = hub

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.endpoint = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield self
            finally:
                self.ended.set()
                server.shutdown()
                thread.join()


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, folder: Path) -> None:
    """Makes this process's huggingface_hub use a hub, without a token, and with its own cache."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    values = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "token"),
        "AGENT_HARNESSES_PATH": str(folder / "harnesses"),
        "HF_HUB_OFFLINE": False,
    }
    for name, value in values.items():
        if hasattr(constants, name):  # not every version has all of them
            monkeypatch.setattr(constants, name, value)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a model's repository: needed ones, and ones that must never be requested."""
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    return NEVER | {name: data for name, data in found.items() if "reference" not in name}


class _Handler(http.server.BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        self._file(body=True)

    def do_POST(self) -> None:
        """/api/models/ORG/NAME/paths-info/REVISION: which of the paths exist."""
        self._remember()
        data = self.rfile.read(int(self.headers["Content-Length"])).decode()
        org, name = self.path.split("/")[3:5]
        if self._refused(f"{org}/{name}"):
            return
        files = self.fake.models[f"{org}/{name}"]
        found = [
            {"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40}
            for path in urllib.parse.parse_qs(data)["paths"]
            if path in files
        ]
        self._answer(200, json.dumps(found).encode())

    def _file(self, *, body: bool) -> None:
        """/ORG/NAME/resolve/REVISION/FILE."""
        self._remember()
        if "/resolve/" not in self.path:  # the library requests more than files
            self._answer(404, b"")
            return
        org, name, _, revision, file = urllib.parse.unquote(self.path).strip("/").split("/", 4)
        files = self.fake.models.get(f"{org}/{name}")
        if self._refused(f"{org}/{name}", file):
            return
        if files is None:
            self._answer(401, b"Repository not found", {"X-Error-Code": "RepoNotFound"})
        elif revision not in COMMITS and revision not in COMMITS.values():
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif file not in files:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            data = files[file]
            headers = {
                "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                "X-Repo-Commit": COMMITS.get(revision, revision),
            }
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            if begin:
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            cut = self.fake.cut.pop(file, None) if body else None
            stalls = body and file in self.fake.stalls
            cut = len(data) // 2 if stalls else cut
            self._answer(206 if begin else 200, data[begin:], headers, body=body, cut=cut)
            if stalls:
                self.wfile.flush()
                self.fake.stalled.set()
                self.fake.ended.wait()

    def _remember(self) -> None:
        self.fake.asked.append((self.command, self.path, dict(self.headers)))

    def _refused(self, *names: str) -> bool:
        for name in names:
            if name in self.fake.refuse:
                status, code = self.fake.refuse[name]
                self._answer(status, b"", {"X-Error-Code": code} if code else {})
                return True
        return False

    def _answer(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        body: bool = True,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data[:cut])
        if cut is not None:
            self.close_connection = True
