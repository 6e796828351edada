"""The Hugging Face Hub in small: its listing and its files, on the loopback."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, file_download

Files = Mapping[str, bytes]


def commit_of(files: Files) -> str:
    """Forty digits of files, as git has them."""
    hashes = sorted(
        (name, hashlib.sha1(data).hexdigest()) for name, data in files.items()
    )
    return hashlib.sha1(repr(hashes).encode()).hexdigest()


@dataclass
class Repository:
    """A model's repository: its commits, and the branches and tags that name them."""

    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, files: Files, *refs: str) -> str:
        """Add files as a commit, to which branches and tags move."""
        commit = commit_of(files)
        self.commits[commit] = dict(files)
        self.refs.update(dict.fromkeys(refs or ("main",), commit))
        return commit


@dataclass
class Hub:
    """A server that is up, what it holds, and what was asked of it."""

    endpoint: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    #: Whose listings anybody sees, and whose files nobody.
    gated: set[str] = field(default_factory=set)
    #: Method and path of each request.
    requests: list[str] = field(default_factory=list)
    #: Bytes after which each download stops for ever.
    stop_after: int | None = None
    #: An answer in the place of all listings: status and content.
    answer: tuple[int, bytes] | None = None

    def fetched(self) -> set[str]:
        """Names of the files that were asked for."""
        paths = [asked.partition(" ")[2] for asked in self.requests]
        return {p.rpartition("/")[2] for p in paths if "/resolve/" in p}


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    # The default looks half a second whether it should end.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(endpoint: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub ask a server, with a cache of its own."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    # Versions have it in one module or in the other.
    name = "HUGGINGFACE_CO_URL_TEMPLATE"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):
        monkeypatch.setattr(module, name, template, raising=False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Print nothing."""

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub
        path = urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        listing = re.fullmatch("/api/models/([^/]+/[^/]+)/revision/([^/]+)", path)
        tree = re.fullmatch("/api/models/([^/]+/[^/]+)/tree/([^/]+)", path)
        file = re.fullmatch("/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if listing and hub.answer is not None:
            self._send(*hub.answer)
            return
        asked = listing or tree or file
        if asked is None or asked[1] not in hub.repositories:
            # As the Hub answers whoever is not logged in.
            self._send(401, error="RepoNotFound")
            return
        repository, revision = hub.repositories[asked[1]], unquote(asked[2])
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._send(404, error="RevisionNotFound")
            return
        files = repository.commits[commit]
        if tree:
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": commit_of({})}
                for name, data in files.items()
            ]
            self._send(200, json.dumps(listed).encode())
        elif listing:
            listed = [{"rfilename": name} for name in files]
            # All that versions of huggingface_hub since 0.20 look for.
            answer = {"id": asked[1], "modelId": asked[1], "private": False}
            answer |= {"downloads": 0, "likes": 0, "tags": []}
            answer |= {"sha": commit, "siblings": listed}
            self._send(200, json.dumps(answer).encode())
        elif asked[1] in hub.gated:
            self._send(403, error="GatedRepo")
        elif (name := unquote(file[3])) not in files:
            self._send(404, error="EntryNotFound", commit=commit)
        else:
            self._send_file(files[name], commit, hub.stop_after)

    def _send_file(self, data: bytes, commit: str, stop_after: int | None) -> None:
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(start[1]) if start else 0
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.send_response(206 if start else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data[begin : max(begin, stop_after or len(data))])
        if stop_after is not None:
            self.close_connection = True

    def _send(self, status: int, content: bytes = b"", *, error="", commit="") -> None:
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
