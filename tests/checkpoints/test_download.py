import hashlib
import os

import pytest

from tests.checkpoints.conftest import REPO, entry
from tresnet.checkpoints.download import fetch
from tresnet.errors import CheckpointError

CONTENT = b"content"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def published(room, hub):
    """(folder, hub, add), with a repository whose weights are `CONTENT`."""
    hub.repos[REPO] = {"model.safetensors": CONTENT}
    return room[0], hub, lambda **changes: room[1](entry(hub_id=REPO, **changes))


def test_the_local_file_comes_first_and_its_hash_is_checked(published):
    folder, hub, add = published
    row = add(sha256=SHA256)
    (folder / row.file).write_bytes(CONTENT)
    assert fetch(row.tag) == folder / row.file
    (folder / row.file).write_bytes(b"wrong")
    with pytest.raises(CheckpointError, match=r"not the published tresnet_m\.miil_in1k: expected"):
        fetch(row.tag)
    assert hub.downloads == []
    add(sha256=None)  # no known hash, nothing to check
    assert fetch(row.tag).read_bytes() == b"wrong"


def test_a_file_is_downloaded_once(published):
    _, hub, add = published
    row = add()
    path = fetch(row.tag)
    assert path.read_bytes() == CONTENT
    assert fetch(row.tag) == path
    assert hub.downloads == ["model.safetensors"]  # the cache sufficed
    kept = path.resolve()
    path.unlink()
    os.rename(kept, path)  # as in a cache on a file system without links, which has no hashes
    with pytest.warns(UserWarning, match=rf"miil_in1k: no published hash .* sha256 is {SHA256}"):
        fetch(row.tag)


@pytest.mark.parametrize(
    ("fault", "changes", "words"),
    [
        ("hash", {}, "expected sha256 .* damaged or was replaced: delete it and try again"),
        ("", {"sha256": "0" * 64}, "expected sha256 0000"),  # the table's comes before the hub's
        ("offline", {}, rf"could not get hf-hub:{REPO} \(LocalEntryNotFoundError: .*"),
        ("offline", {}, f"put the file of https://huggingface.co/{REPO}/resolve/main/model.safet"),
        ("offline", {}, r"weights/tresnet_m.miil_in1k.\w+ or elsewhere and give its path"),
        ("", {"hub_id": None, "file": "a.safetensors"}, "weights/a.safetensors; get it from the"),
    ],
)
def test_what_cannot_be_had_is_said(room, hub, fault, changes, words):
    hub.repos[REPO] = {"model.safetensors": CONTENT}
    hub.fault = fault
    with pytest.raises(CheckpointError, match=words):
        fetch(room[1](entry(**{"hub_id": REPO, **changes})))


def test_an_original_that_is_not_public_any_more_is_replaced(room, caplog):
    folder, add = room
    copy = add(entry(sha256=SHA256))
    (folder / copy.file).write_bytes(CONTENT)
    row = add(entry(tag="original", file="a.pth", hub_id=None, url="https://a/b", copy=copy.tag))
    assert fetch("original").read_bytes() == CONTENT
    assert "original: its authors no longer offer https://a/b; the same weights" in caplog.text
    assert f"are in {copy.tag}, which is used" in caplog.text
    (folder / row.file).write_bytes(b"kept")
    assert fetch("original") == folder / row.file
