"""A server on this machine for downloads by huggingface_hub, and its uploads in memory."""

import contextlib
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

REPO = "user/name"
LARGE = ".safetensors"  # what the hub keeps by its hash


class Hub(http.server.ThreadingHTTPServer):
    """Repositories in memory; `fault` "hash" damages large files, "refused" refuses uploads."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commit, self.old = "1" * 40, {}  # of main; the files of earlier ones
        self.fault, self.requests = "", []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": len(body)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def file(self) -> bytes | None:
        repo, _, rest = self.path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        files = self.server.repos.get(repo)
        if revision not in ("main", self.server.commit):
            files = self.server.old.get(revision)
        if files is None or name not in files:
            self.answer(404, X_Error_Code="RepoNotFound" if files is None else "EntryNotFound")
            return None
        return files[name]

    def headers_of(self, content: bytes) -> dict[str, object]:
        wrong = b"!" if self.server.fault == "hash" and self.path.endswith(LARGE) else b""
        kind = hashlib.sha256 if self.path.endswith(LARGE) else hashlib.sha1
        revision = self.path.partition("/resolve/")[2].partition("/")[0]
        commit = self.server.commit if revision == "main" else revision
        return {"ETag": f'"{kind(content + wrong).hexdigest()}"', "X-Repo-Commit": commit}

    def do_HEAD(self) -> None:
        self.server.requests.append(("HEAD", self.path))
        if (content := self.file()) is not None:
            self.answer(200, content, **self.headers_of(content))

    def do_GET(self) -> None:
        self.server.requests.append(("GET", self.path))
        if (content := self.file()) is not None:
            self.answer(200, content, **self.headers_of(content))


@contextlib.contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, cache: str) -> Iterator[Hub]:
    """The server, in a thread, as what huggingface_hub takes for the hub; with an empty cache."""
    constants = huggingface_hub.constants
    with Hub() as hub:
        for name, value in {
            "ENDPOINT": hub.address,  # what HF_ENDPOINT sets
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": cache,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }.items():
            monkeypatch.setattr(constants, name, value)

        def create_repo(self: object, repo_id: str, private: bool, exist_ok: bool) -> None:
            if hub.fault == "refused":
                raise HfHubHTTPError("403: not yours", response=MagicMock(headers={}))

        def upload_folder(self: object, repo_id: str, folder_path: Path, **_: str) -> str:
            assert repo_id not in hub.repos, "one commit"
            hub.repos[repo_id] = {path.name: path.read_bytes() for path in folder_path.iterdir()}
            return repo_id

        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
        monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
