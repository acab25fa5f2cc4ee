import hashlib
from pathlib import Path
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import timm.models._hub
from huggingface_hub import errors

from tresnet.checkpoints import locate

PUBLISHED = locate.entries()["tresnet_m.miil_in1k"]
REPO = "user/name"


def entry(**changes):
    return PUBLISHED._replace(**changes)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """An own weights folder and table: (folder, rows by tag)."""
    folder, rows = tmp_path / "weights", {}
    folder.mkdir()
    monkeypatch.setattr(locate, "weights_dir", lambda: folder)
    monkeypatch.setattr(locate, "entries", lambda: rows)
    return folder, rows


class Hub:
    """A hub of one commit in memory, in place of huggingface_hub's functions."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.commit = cache, "1" * 40
        self.repos: dict[str, dict[str, bytes]] = {}
        self.fault, self.downloads = "", []  # "hash", "offline" or "refused"; (name, revision)

    def download(
        self, repo_id, filename, *, revision=None, local_files_only=False, **_: object
    ) -> str:
        path = self.cache / repo_id / self.commit / filename
        if path.is_file():
            return str(path)
        if self.fault == "offline" or local_files_only:
            raise errors.LocalEntryNotFoundError("not in the cache")
        if repo_id not in self.repos:
            raise errors.RepositoryNotFoundError("404", response=MagicMock(headers={}))
        if filename not in self.repos[repo_id]:
            raise errors.EntryNotFoundError("404")
        self.downloads.append((filename, revision))
        content = self.repos[repo_id][filename]
        kind = hashlib.sha256 if filename.endswith(".safetensors") else hashlib.sha1
        blob = self.cache / kind(content + b"!" * (self.fault == "hash")).hexdigest()
        blob.write_bytes(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(blob)
        return str(path)

    def create_repo(self, repo_id, private, exist_ok) -> None:
        if self.fault == "refused":
            raise errors.HfHubHTTPError("403: not yours", response=MagicMock(headers={}))

    def upload_folder(self, repo_id, folder_path, **_: object) -> str:
        assert repo_id not in self.repos, "one commit"
        self.repos[repo_id] = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        return repo_id


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose cache is empty."""
    made = Hub(tmp_path / "cache")
    made.cache.mkdir()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
    monkeypatch.setattr(timm.models._hub, "hf_hub_download", made.download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: made)
    return made
