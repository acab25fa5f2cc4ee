from pathlib import Path

from tresnet.measure.accuracy import published_top1

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_ours_and_timms_are_the_published_table():
    for model in ("tresnet_m", "timm:tresnet_m"):
        found = published_top1(model, 224)
        assert [(one.weights, one.top1) for one in found] == [
            ("tresnet_m.miil_in1k", 80.816),
            ("tresnet_m.miil_in21k_ft_in1k", 83.090),
        ]
        assert all("timm's results-imagenet.csv" in one.source for one in found)
    (large,) = published_top1("tresnet_xl", 448)
    assert f"| {large.weights} | 448 | {large.top1:.3f} |" in README


def test_torchvisions_is_its_own_metadata():
    (found,) = published_top1("torchvision:resnet50", 224)
    assert (found.weights, found.top1) == ("resnet50.IMAGENET1K_V2", 80.858)


def test_nothing_is_claimed_where_nothing_is_published():
    assert published_top1("tresnet_m", 192) == []
    assert published_top1("tresnet_t", 32) == []  # trained on digits
    assert published_top1("timm:resnet50", 224) == []
    assert published_top1("torchvision:resnet50", 160) == []
