"""The table of published weights against timm's; files that are found, downloaded and checked."""

import hashlib
import os

import pytest
from timm.data import ImageNetInfo
from timm.models.tresnet import default_cfgs

from tests.checkpoints.conftest import REPO, entry
from tresnet.checkpoints.locate import class_names, entries, fetch, list_weights
from tresnet.errors import CheckpointError, InputError
from tresnet.models.zoo import VARIANTS

# timm's module has its own table: the registry may hold ours
TIMM = {
    f"{model}.{tag}": cfg for model, rows in default_cfgs.items() for tag, cfg in rows.cfgs.items()
}
ORIGINAL = [f"{m}{s}" for m in ("tresnet_m", "tresnet_l", "tresnet_xl") for s in ("", "_448")]
CONTENT = b"content"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_every_published_file_is_listed():
    assert set(TIMM) <= set(list_weights())
    assert list_weights("tresnet_v2_l") == sorted(tag for tag in TIMM if "v2_l" in tag)
    assert list_weights("tresnet_s") == []
    with pytest.raises(InputError, match="unknown model 'tresnet_n'"):
        list_weights("tresnet_n")
    urls = {row.url for row in entries().values()} - {None}
    folder = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/tresnet"
    assert urls == {f"{folder}/{name}.pth" for name in ORIGINAL}


@pytest.mark.parametrize("tag", TIMM)
def test_timms_rows_agree_with_timms_table(tag):
    theirs, ours = TIMM[tag], entries()[tag]
    assert theirs.hf_hub_id == "timm/"  # completed by the tag
    assert (ours.hub_id, ours.format) == (f"timm/{tag}", "timm")
    for field in ("num_classes", "license", "input_size", "interpolation"):
        assert getattr(ours, field) == getattr(theirs, field)
    crop = (theirs.crop_pct, "center") if ours.input_size[1] == 224 else (1.0, "squash")
    assert (ours.crop_pct, ours.crop_mode) == crop


def test_rows_are_sound():
    for tag, row in entries().items():
        assert row.model in VARIANTS
        assert row.file.startswith(tag)
        assert row.license == "apache-2.0"
        assert (row.top1 is None) == (row.accuracy_source is None)
        if row.copy is not None:
            copy = entries()[row.copy]
            own = {"tag": copy.pretrained_cfg["tag"], "url": "", "hf_hub_id": copy.hub_id}
            assert copy.pretrained_cfg == row.pretrained_cfg | own
        assert row.sha256 is None or len(row.sha256) == 64
        assert not (row.hub_id and row.url)
        assert row.pretrained_cfg["tag"] == tag.partition(".")[2]
    assert entries()["tresnet_xl.miil_in1k_448"].top1 == 83.066
    assert entries()["tresnet_m.miil_in21k"].num_classes == 11221


@pytest.mark.parametrize("changes", [{"num_classes": 10}, {"trained_on": "Places365"}])
def test_other_classes_have_no_known_names(changes):
    assert class_names(entry(**changes)) == (None, None)


@pytest.mark.parametrize(
    ("tag", "subset", "first"),
    [
        ("tresnet_m.miil_in1k", "imagenet-1k", "n01440764"),
        ("tresnet_m.miil_in21k", "imagenet-21k-miil", "n00005787"),
    ],
)
def test_imagenets_classes_are_those_of_its_folders(tag, subset, first):
    ids, words = class_names(entries()[tag])
    timms = ImageNetInfo(subset)
    assert (ids, words) == (timms.label_names(), timms.label_descriptions())
    assert ids[0] == first == min(ids)  # sorted, as folders are numbered


def test_the_local_file_comes_first_and_its_hash_is_checked(room, hub):
    row = entry(sha256=SHA256)
    path = room[0] / row.file
    path.write_bytes(CONTENT)
    assert fetch(row) == path
    path.write_bytes(b"wrong")
    with pytest.raises(CheckpointError, match=r"not the published tresnet_m\.miil_in1k: expected"):
        fetch(row)
    assert hub.downloads == []
    assert fetch(entry(sha256=None)).read_bytes() == b"wrong"  # no known hash, nothing to check


def test_a_file_is_downloaded_once(room, hub):
    hub.repos[REPO] = {"model.safetensors": CONTENT}
    row = entry(hub_id=REPO)
    path = fetch(row)
    assert path.read_bytes() == CONTENT
    assert fetch(row) == path
    assert hub.downloads == [("model.safetensors", None)]  # the cache sufficed
    os.rename(path.resolve(), path)  # as in a cache on a file system without links: no hash
    assert fetch(row) == path


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
        fetch(entry(**{"hub_id": REPO, **changes}))


def test_an_original_that_is_not_public_any_more_is_replaced(room, caplog):
    folder, rows = room
    copy = rows["copy"] = entry(tag="copy", sha256=SHA256)
    (folder / copy.file).write_bytes(CONTENT)
    row = entry(tag="original", file="a.pth", hub_id=None, url="https://a/b", copy="copy")
    assert fetch(row).read_bytes() == CONTENT
    assert "original: its authors no longer offer https://a/b; the same weights" in caplog.text
    assert "are in copy, which is used" in caplog.text
    (folder / row.file).write_bytes(b"kept")
    assert fetch(row) == folder / row.file
