import pytest
from timm.data import ImageNetInfo

from tests.checkpoints.conftest import entry
from tresnet.checkpoints import published
from tresnet.checkpoints.published import class_names, find, list_weights, locate
from tresnet.errors import CheckpointError, InputError
from tresnet.models.zoo import VARIANTS

TIMM_TAGS = {
    "tresnet_m": ("miil_in1k", "miil_in21k", "miil_in21k_ft_in1k", "miil_in1k_448"),
    "tresnet_l": ("miil_in1k", "miil_in1k_448"),
    "tresnet_xl": ("miil_in1k", "miil_in1k_448"),
    "tresnet_v2_l": ("miil_in21k", "miil_in21k_ft_in1k"),
}
TIMM = [f"{model}.{tag}" for model, tags in TIMM_TAGS.items() for tag in tags]
ORIGINAL = [f"{m}{s}" for m in ("tresnet_m", "tresnet_l", "tresnet_xl") for s in ("", "_448")]


def test_every_published_file_is_listed():
    assert set(TIMM) <= set(list_weights())
    assert list_weights("tresnet_v2_l") == [tag for tag in TIMM if "v2_l" in tag]
    assert list_weights("tresnet_s") == []
    with pytest.raises(InputError, match="unknown model 'tresnet_n'"):
        list_weights("tresnet_n")
    urls = {find(tag).url for tag in list_weights()} - {None}
    folder = "https://miil-public-eu.oss-eu-central-1.aliyuncs.com/model-zoo/tresnet"
    assert urls == {f"{folder}/{name}.pth" for name in ORIGINAL}


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
        if row.copy is not None:
            cfg = find(row.copy).pretrained_cfg
            own = {"tag": cfg["tag"], "url": "", "hf_hub_id": find(row.copy).hub_id}
            assert cfg == row.pretrained_cfg | own
        assert row.sha256 is None or len(row.sha256) == 64
        assert not (row.hub_id and row.url)
    assert find("tresnet_xl.miil_in1k_448").top1 == 83.066
    assert find("tresnet_xl.miil_in1k_448").pretrained_cfg["tag"] == "miil_in1k_448"
    assert find("tresnet_t.digits").pretrained_cfg["tag"] == "digits"
    assert find("tresnet_m.miil_in21k").num_classes == 11221


def test_a_package_without_its_table_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "weights_dir", lambda: tmp_path)
    for use in (list_weights, lambda: locate("mine.safetensors")):
        with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read \(No such file"):
            use()


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
    ids, words = class_names(find(tag))
    timms = ImageNetInfo(subset)
    assert (ids, words) == (timms.label_names(), timms.label_descriptions())
    assert ids[0] == first == min(ids)  # sorted, as folders are numbered
