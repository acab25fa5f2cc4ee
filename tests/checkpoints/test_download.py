import hashlib

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from tests.checkpoints.conftest import entry
from tresnet.checkpoints.download import fetch
from tresnet.errors import CheckpointError


def hub(tmp_path, content, monkeypatch, *, online=True, name=None):
    """Replace huggingface_hub's download by one that lays its cache out as the real one does."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    calls = []

    def fake(repo_id, filename, revision=None, local_files_only=False):
        calls.append((repo_id, filename, local_files_only))
        pointer = snapshot / filename
        if not pointer.exists():
            if local_files_only or not online:
                raise LocalEntryNotFoundError("cannot find it in the cache, and no connection")
            blobs.mkdir()
            snapshot.mkdir(parents=True)
            blob = blobs / (name or hashlib.sha256(content).hexdigest())
            blob.write_bytes(content)
            pointer.symlink_to(blob)
        return str(pointer)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake)
    return calls


def test_fetch_takes_the_local_file_first_and_checks_its_hash(room, tmp_path, monkeypatch):
    folder, add = room
    calls = hub(tmp_path, b"hub", monkeypatch)
    row = add(entry(sha256=hashlib.sha256(b"right").hexdigest()))
    (folder / row.file).write_bytes(b"right")
    assert fetch(row.tag) == folder / row.file
    assert calls == []
    (folder / row.file).write_bytes(b"wrong")
    with pytest.raises(
        CheckpointError, match=r"not the published tresnet_m\.miil_in1k: expected sha"
    ):
        fetch(row.tag)


def test_fetch_from_the_hub_and_then_from_its_cache(room, tmp_path, monkeypatch):
    _, add = room
    calls = hub(tmp_path, b"content", monkeypatch)
    row = add(entry())
    path = fetch(row.tag)
    assert path.read_bytes() == b"content"
    assert calls == [
        ("timm/tresnet_m.miil_in1k", "model.safetensors", True),
        ("timm/tresnet_m.miil_in1k", "model.safetensors", False),
    ]
    assert fetch(row.tag) == path
    assert len(calls) == 3  # the cache sufficed


def test_the_hubs_own_hash_is_checked(room, tmp_path, monkeypatch):
    _, add = room
    row = add(entry())
    hub(tmp_path, b"damaged", monkeypatch, name=hashlib.sha256(b"content").hexdigest())
    with pytest.raises(CheckpointError, match="damaged or was replaced: delete it and try again"):
        fetch(row.tag)
    add(entry(sha256="0" * 64))  # the table's hash comes before the hub's
    with pytest.raises(CheckpointError, match="expected sha256 0000"):
        fetch(row.tag)


def test_a_hub_file_without_a_hash_warns(room, tmp_path, monkeypatch):
    _, add = room
    row = add(entry())
    hub(tmp_path, b"content", monkeypatch, name="abc")
    with pytest.warns(UserWarning, match=r"tresnet_m.miil_in1k: no published hash .* is ed7002b4"):
        fetch(row.tag)


def test_offline_says_where_to_put_the_file(room, tmp_path, monkeypatch):
    folder, add = room
    row = add(entry())
    hub(tmp_path, b"", monkeypatch, online=False)
    with pytest.raises(CheckpointError) as info:
        fetch(row.tag)
    message = str(info.value)
    assert "could not get tresnet_m.miil_in1k (LocalEntryNotFoundError: cannot find" in message
    assert (
        "https://huggingface.co/timm/tresnet_m.miil_in1k/resolve/main/model.safetensors" in message
    )
    assert f"at {folder / row.file} or elsewhere and give its path" in message
    assert issubclass(LocalEntryNotFoundError, EntryNotFoundError)


def test_a_missing_file_of_this_project(room):
    folder, add = room
    row = add(entry(tag="digits", file="digits.safetensors", hub_id=None))
    with pytest.raises(CheckpointError, match=rf"expected {folder / row.file}; get it from the"):
        fetch("digits")


def test_an_original_that_is_not_public_any_more_is_replaced(room, caplog):
    folder, add = room
    copy = add(entry(sha256=hashlib.sha256(b"copy").hexdigest()))
    (folder / copy.file).write_bytes(b"copy")
    row = add(entry(tag="original", file="a.pth", hub_id=None, url="https://a/b", copy=copy.tag))
    assert fetch("original").read_bytes() == b"copy"
    assert "original: its authors no longer offer https://a/b; the same weights" in caplog.text
    assert f"are in {copy.tag}, which is taken" in caplog.text
    (folder / row.file).write_bytes(b"kept")
    assert fetch("original") == folder / row.file
