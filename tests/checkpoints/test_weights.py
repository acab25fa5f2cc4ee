import pytest
import torch

from tests.checkpoints.conftest import entry
from tests.toys import small, small_public, zeros
from tresnet.checkpoints.save import save_checkpoint
from tresnet.checkpoints.weights import open_weights
from tresnet.models.zoo import VARIANTS, build


def test_a_tag_whose_file_is_here(room):
    folder, rows = room
    options = {"hub_id": None, "input_size": (3, 32, 32), "crop_mode": "squash"}
    row = rows["digits"] = entry(tag="digits", file="digits.safetensors", **options)
    save_checkpoint(small(block_size=2), folder / row.file, metadata={"classes": list("01234")})
    found = open_weights("digits")
    assert (found.entry, found.pretrained_cfg["crop_mode"]) == (row, "squash")
    assert (found.weights.path, found.classes) == (folder / row.file, tuple("01234"))
    cfg = found.pretrained_cfg
    assert (cfg["input_size"], cfg["pool_size"], found.num_classes) == ((3, 32, 32), (2, 2), 5)
    assert found.weights.format == "tresnet"


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_files_of_others(tmp_path, name):
    complete = build(name, num_classes=9, device="meta").state_dict()
    torch.save(zeros(complete), tmp_path / "a.pth")
    found = open_weights(tmp_path / "a.pth")
    assert (found.config.variant, found.num_classes, found.weights.format) == (name, 9, "timm")
    assert found.config.in_chans == 3
    assert found.config.block_size == VARIANTS[name].block_size
    assert not found.guessed


def test_a_public_file_of_no_variant(tmp_path):
    torch.save(small_public(v2=True).state_dict(), tmp_path / "a.pth")
    found = open_weights(tmp_path / "a.pth")
    config = found.config
    assert (config.variant, found.guessed, found.weights.format) == ("tresnet_v2_l", True, "public")
    assert (config.layers, config.width_factor, config.block_slope) == ((1, 2, 1, 1), 0.25, 1e-6)
