import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from tests.checkpoints.small import small, small_public, trained
from tresnet.checkpoints import manifest, table
from tresnet.checkpoints.manifest import describe, fetch, find, list_weights
from tresnet.checkpoints.save import save_checkpoint
from tresnet.errors import CheckpointError, InputError
from tresnet.models.zoo import VARIANTS, build

TIMM_TAGS = {
    "tresnet_m": ("miil_in1k", "miil_in21k", "miil_in21k_ft_in1k", "miil_in1k_448"),
    "tresnet_l": ("miil_in1k", "miil_in1k_448"),
    "tresnet_xl": ("miil_in1k", "miil_in1k_448"),
    "tresnet_v2_l": ("miil_in21k", "miil_in21k_ft_in1k"),
}
TIMM = [f"{model}.{tag}" for model, tags in TIMM_TAGS.items() for tag in tags]
ORIGINAL = [f"{m}{s}" for m in ("tresnet_m", "tresnet_l", "tresnet_xl") for s in ("", "_448")]
PUBLISHED = find("tresnet_m.miil_in1k")


def entry(**changes):
    return replace(PUBLISHED, **changes)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """An own table, weights folder, and empty caches: (folder, function that adds a row)."""
    folder = tmp_path / "weights"
    folder.mkdir()
    rows = {}
    monkeypatch.setattr(table, "weights_dir", lambda: folder)
    monkeypatch.setattr(manifest, "weights_dir", lambda: folder)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for module in (table, manifest):
        monkeypatch.setattr(module, "entries", lambda: rows)

    def add(made):
        rows[made.tag] = made
        return made

    return folder, add


def hub(tmp_path, content, monkeypatch, *, online=True, name=None):
    """Replace huggingface_hub's download by one that lays its cache out as the real one does."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    calls = []

    def fake(repo_id, filename, local_files_only=False):
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


def test_every_published_file_is_listed():
    assert set(TIMM) <= set(list_weights())
    urls = {find(tag).url for tag in list_weights()} - {None}
    folder = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/tresnet"
    assert urls == {f"{folder}/{name}.pth" for name in ORIGINAL}


def test_list_of_one_model():
    found = list_weights("tresnet_v2_l")
    assert found == ["tresnet_v2_l.miil_in21k", "tresnet_v2_l.miil_in21k_ft_in1k"]
    assert list_weights("tresnet_s") == []
    with pytest.raises(InputError, match=r"unknown model 'tresnet_n'.*tresnet_[a-z]"):
        list_weights("tresnet_n")


@pytest.mark.parametrize("tag", TIMM)
def test_timms_rows_agree_with_timms_table(tag):
    from timm.models.tresnet import default_cfgs  # their module's: the registry may hold ours

    model, _, name = tag.partition(".")
    theirs, ours = default_cfgs[model].cfgs[name], find(tag)
    assert theirs.hf_hub_id == "timm/"  # completed by the tag
    assert ours.hub_id == f"timm/{tag}"
    assert (ours.num_classes, ours.license) == (theirs.num_classes, theirs.license)
    assert (ours.input_size, ours.interpolation) == (theirs.input_size, theirs.interpolation)
    assert ours.format == "timm"
    if ours.input_size[1] == 224:
        assert (ours.crop_pct, ours.crop_mode) == (theirs.crop_pct, "center")
    else:
        assert (ours.crop_pct, ours.crop_mode) == (1.0, "squash")


def test_rows_are_sound():
    for tag in list_weights():
        row = find(tag)
        assert row.model in VARIANTS
        assert row.file.startswith(tag)
        assert row.license == "apache-2.0"
        assert (row.top1 is None) == (row.accuracy_source is None)
        assert row.sha256 is None or len(row.sha256) == 64
        assert not (row.hub_id and row.url)
    assert find("tresnet_xl.miil_in1k_448").top1 == 83.066
    assert find("tresnet_m.miil_in21k").num_classes == 11221


def test_a_plain_http_address_is_refused(tmp_path):
    rows = json.loads((table.weights_dir() / "manifest.json").read_text())
    rows["weights"][-1]["url"] = "http://example.org/a.pth"
    (tmp_path / "manifest.json").write_text(json.dumps(rows))
    with pytest.raises(CheckpointError, match="expected https addresses only, see"):
        table._entries(tmp_path / "manifest.json")


def test_an_unknown_tag_suggests_the_nearest():
    with pytest.raises(
        InputError, match=r"'tresnet_m.miil_1k'; did you mean 'tresnet_m.miil_in1k'"
    ):
        find("tresnet_m.miil_1k")
    with pytest.raises(InputError, match=r"unknown weights 'zzz'\. Known: .*or give the path"):
        describe("zzz")


def test_the_table_of_a_wheel_is_inside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "tresnet" / "checkpoints"
    package.mkdir(parents=True)
    monkeypatch.setattr(table, "__file__", str(package / "table.py"))
    assert table.weights_dir() == tmp_path / "weights"
    (tmp_path / "tresnet" / "weights").mkdir()
    (tmp_path / "tresnet" / "weights" / "manifest.json").touch()
    assert table.weights_dir() == tmp_path / "tresnet" / "weights"


def test_fetch_takes_the_local_file_first(room, tmp_path, monkeypatch):
    folder, add = room
    calls = hub(tmp_path, b"hub", monkeypatch)
    row = add(entry())
    (folder / row.file).write_bytes(b"local")
    assert fetch(row.tag) == folder / row.file
    assert calls == []


def test_fetch_checks_the_hash_of_a_local_file(room):
    folder, add = room
    row = add(entry(sha256=hashlib.sha256(b"right").hexdigest()))
    (folder / row.file).write_bytes(b"right")
    assert fetch(row.tag) == folder / row.file
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


def test_the_tables_hash_wins_over_the_hubs(room, tmp_path, monkeypatch):
    _, add = room
    row = add(entry(sha256="0" * 64))
    hub(tmp_path, b"content", monkeypatch)
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


class Server(http.server.BaseHTTPRequestHandler):
    content = b"public" * 1000

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(self.content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()

    def do_GET(self):
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        extra = 1 if self.path == "/short" else 0
        self.send_header("Content-Length", str(len(self.content) + extra))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_fetch_from_an_address(room, server, tmp_path):
    _, add = room
    row = add(entry(file="a.pth", hub_id=None, url=f"{server}/a.pth"))
    digest = hashlib.sha256(Server.content).hexdigest()
    with pytest.warns(UserWarning, match=f"no published hash to check .*its sha256 is {digest}"):
        path = fetch(row.tag)
    assert path == tmp_path / "hub" / "checkpoints" / "a.pth"
    assert path.read_bytes() == Server.content
    add(replace(row, sha256=digest, url=f"{server}/missing"))
    assert fetch(row.tag) == path  # cached, and now the hash is known


@pytest.mark.parametrize(("file", "reason"), [("missing", "404"), ("short", "bytes|Incomplete")])
def test_a_failed_download_leaves_nothing(room, server, tmp_path, file, reason):
    _, add = room
    row = add(entry(file="a.pth", hub_id=None, url=f"{server}/{file}"))
    with pytest.raises(CheckpointError, match=rf"could not get .*({reason}).*put the file of http"):
        fetch(row.tag)
    assert list((tmp_path / "hub" / "checkpoints").iterdir()) == []


def test_the_real_hub_client(server, tmp_path):
    """The cache it lays out names the file by the hash that is then checked."""
    code = (
        "from tresnet.checkpoints import download\n"
        "path = download.from_hub('owner/name', 'model.safetensors')\n"
        "assert download.from_hub('owner/name', 'model.safetensors') == path\n"
        "print(path, download.hub_sha256(path))\n"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": server,
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    path, digest = run.stdout.split()
    assert Path(path).read_bytes() == Server.content
    assert Path(path).is_relative_to(tmp_path)
    assert digest == hashlib.sha256(Server.content).hexdigest()


def test_describe_a_tag_that_is_not_here(room):
    _, add = room
    row = add(entry(num_classes=7, input_size=(3, 448, 448), crop_mode="squash", crop_pct=1.0))
    found = describe(row.tag)
    assert (found.model, found.num_classes, found.path) == ("tresnet_m", 7, None)
    assert (found.input_size, found.crop_pct, found.crop_mode) == ((3, 448, 448), 1.0, "squash")
    assert (found.interpolation, found.classes, found.format) == ("bilinear", None, "timm")
    assert found.pretrained_cfg["pool_size"] == (14, 14)
    assert found.entry is row


def test_describe_a_file_of_ours(tmp_path):
    path = tmp_path / "a.safetensors"
    model = small(block_size=2, in_chans=1)
    model.pretrained_cfg |= {"input_size": (1, 48, 64), "crop_mode": "squash"}
    save_checkpoint(model, path, metadata={"classes": ["a", "b"], "top1": 99.0})
    found = describe(path)
    assert (found.model, found.num_classes, found.path) == ("tresnet_m", 5, path)
    assert found.kwargs["block_size"] == 2
    assert found.kwargs["layers"] == (1, 2, 1, 1)
    assert (found.input_size, found.crop_mode) == ((1, 48, 64), "squash")
    assert found.pretrained_cfg["pool_size"] == (3, 4)
    assert found.classes == ("a", "b")
    assert found.user["top1"] == 99.0
    assert not found.guessed


def test_describe_a_tag_whose_file_is_here(room):
    folder, add = room
    row = add(entry(tag="digits", file="digits.safetensors", hub_id=None, input_size=(3, 32, 32)))
    save_checkpoint(small(), folder / row.file, metadata={"classes": ["0"]})
    found = describe("digits")
    assert (found.path, found.classes) == (folder / row.file, ("0",))
    assert (found.input_size, found.num_classes, found.format) == ((3, 32, 32), 5, "tresnet")


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_describe_files_of_others(tmp_path, name):
    whole = build(name, num_classes=9, device="meta").state_dict()
    torch.save(
        {key: torch.zeros(()).expand(t.shape) for key, t in whole.items()}, tmp_path / "a.pth"
    )
    found = describe(tmp_path / "a.pth")
    assert (found.model, found.num_classes, found.format) == (name, 9, "timm")
    assert found.kwargs["in_chans"] == 3
    assert found.kwargs["block_size"] == VARIANTS[name].block_size
    assert not found.guessed


def test_describe_a_public_file_of_no_variant(tmp_path):
    torch.save(small_public(v2=True).state_dict(), tmp_path / "a.pth")
    found = describe(tmp_path / "a.pth")
    assert (found.model, found.guessed, found.format) == ("tresnet_v2_l", True, "public")
    assert (found.kwargs["layers"], found.kwargs["width_factor"]) == ((1, 2, 1, 1), 0.25)


def test_describe_a_part_of_a_model(tmp_path):
    tensors = trained(small()).state_dict()
    torch.save({k: v for k, v in tensors.items() if "layer4" not in k}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"holds only a part of a TResNet \(stages 1-2-1-0"):
        describe(tmp_path / "a.pth")
