"""A server on this machine that speaks as much of the Hugging Face hub's protocol as is used."""

import base64
import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator

import huggingface_hub
import pytest

REPO = "user/name"
LARGE = ".safetensors"  # what the hub keeps by its hash


class Hub(http.server.ThreadingHTTPServer):
    """Repositories in memory; `fault` says what goes wrong with a large file."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commit, self.old = "1" * 40, {}  # of main; the files of earlier ones
        self.objects: dict[str, bytes] = {}
        self.fault, self.requests = "", []
        self.ended = threading.Event()

    def handle_error(self, *args) -> None:
        pass  # a client that has gone

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
        if (content := self.file()) is None:
            return
        headers = self.headers_of(content)
        first = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        fault = self.server.fault if self.path.endswith(LARGE) else ""
        if fault == "truncated":
            self.answer(200, content[: len(content) // 2], **headers)
        elif fault in ("dropped", "slow") and first == 0:  # no more than half of it arrives
            self.answer(200, content[: len(content) // 2], **headers, Content_Length=len(content))
            self.server.ended.wait(5 if fault == "slow" else 0)
            self.close_connection = True
        elif first:
            span = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.answer(206, content[first:], **headers, Content_Range=span)
        else:
            self.answer(200, content, **headers)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[self.path.rpartition("/")[2]] = content
        self.answer(200)

    def do_POST(self) -> None:
        self.server.requests.append(("POST", self.path))
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.fault == "refused":
            self.answer(403, b'{"error": "you may not write here"}')
            return
        said = {"url": f"{self.server.address}/{REPO}", "warnings": [], "errors": []}
        if self.path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(body)["files"]]
            said = {"files": [self.upload(name) for name in names]}
        elif self.path.endswith("/objects/batch"):
            put = {"href": f"{self.server.address}/objects/{{}}", "header": {}}
            objects = [
                {**one, "actions": {"upload": {**put, "href": put["href"].format(one["oid"])}}}
                for one in json.loads(body)["objects"]
            ]
            said = {"transfer": "basic", "objects": objects}
        elif self.path.endswith("/commit/main"):
            self.commit([json.loads(line) for line in body.splitlines()])
            said = {"success": True, "commitOid": "1" * 40, "commitUrl": f"{said['url']}/commit/1"}
        self.answer(200, json.dumps(said).encode())

    def upload(self, name: str) -> dict[str, object]:
        kind = "lfs" if name.endswith(LARGE) else "regular"
        return {"path": name, "uploadMode": kind, "shouldIgnore": False}

    def commit(self, lines: list[dict]) -> None:
        repo = self.server.repos.setdefault(REPO, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo[value["path"]] = self.server.objects[value["oid"]]


@contextlib.contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, cache: str) -> Iterator[Hub]:
    """The server, in a thread, as what huggingface_hub takes for the hub; with an empty cache."""
    constants = huggingface_hub.constants
    with Hub() as hub:
        for name, value in {
            "ENDPOINT": hub.address,  # what HF_ENDPOINT sets
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": cache,
            "DOWNLOAD_CHUNK_SIZE": 1 << 16,  # a file of a few MiB arrives in parts too
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.ended.set()
            hub.shutdown()
            thread.join()
