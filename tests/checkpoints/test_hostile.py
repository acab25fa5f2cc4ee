"""Damaged, malicious and absurd files: an error that names the file, and no model changed."""

import random

import pytest
import safetensors.torch
import torch

from tests.toys import CLASSES, same, small, small_public, smallest, snapshot, trained
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.fit import load_checkpoint
from tresnet.checkpoints.read import read_file
from tresnet.checkpoints.save import checkpoint_metadata, save_checkpoint
from tresnet.errors import CheckpointError, TResNetError

SEEDS = range(80)  # mutations of each format


def tiny(seed=0):
    return trained(smallest("tresnet_m", num_classes=CLASSES, width_factor=1 / 32), seed)


def flip(data, chance):
    """Flip one bit, as often in the file's headers as in its tensors."""
    end = chance.choice([200, 20_000, len(data)])
    start = chance.choice([0, max(len(data) - end, 0)])
    at = min(start + chance.randrange(end), len(data) - 1)
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def cut(data, chance):
    return data[: chance.randrange(len(data))]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a sound file of each kind, its tensors and its metadata."""
    folder, files = tmp_path_factory.mktemp("sound"), {}
    for kind in ("a.safetensors", "a.pth", "timm.pth"):
        format = "timm" if kind == "timm.pth" else "tresnet"
        save_checkpoint(tiny(), folder / kind, format=format)
        files[kind] = (folder / kind).read_bytes()
    return files


@pytest.mark.parametrize("kind", ["a.safetensors", "a.pth", "timm.pth"])
def test_mutated_files_change_no_model_and_are_named(tmp_path, sound, kind):
    """A file that does not load changes no bit."""
    model, refused = tiny(seed=1), 0
    before, path = snapshot(model), tmp_path / kind
    for seed in SEEDS:
        chance = random.Random(seed)
        mutate = chance.choice([flip, flip, cut])
        path.write_bytes(mutate(sound[kind], chance))
        try:
            open_checkpoint(path)
            load_checkpoint(model, path)
        except TResNetError as error:
            refused += 1
            message = str(error)
            assert kind in message, seed
            assert same(before, model.state_dict()), seed
        model.load_state_dict(before)
    assert refused > len(SEEDS) / 4


def with_metadata(**changes):
    metadata = {**checkpoint_metadata(tiny()), **changes}
    return {"state_dict": tiny().state_dict(), "tresnet": metadata}


def config(**changes):
    return {"config": {**tiny().config.to_dict(), **changes}}


def with_tensor(name, value):
    tensors = dict(tiny().state_dict())
    tensors[name] = value
    return tensors


NO_FILTER = small_public().state_dict()
OURS, PUBLIC = small().state_dict(), small_public(filters=True).state_dict()
OF_ITSELF, LAYER = {}, {"criterion.weight": torch.ones(2)}
OF_ITSELF["state_dict"] = OF_ITSELF
BLUR, CONV = "body.layer2.0.conv1.1.op.filt", "body.layer2.0.conv1.0"
STEM = "body.conv1.conv.weight"
WITHOUT_LAST = {key: value for key, value in tiny().state_dict().items() if "layer4" not in key}
METADATA = [
    (config(width_factor=1e308), "width_factor: expected at most 64, got 1e.308"),
    (config(width_factor=60.0), "says it holds .* but its tensors are of"),
    (config(num_classes=10**6), "1000000 classes.* but its tensors are of .* 5 classes"),
    (config(variant="tresnet_q"), "unknown model 'tresnet_q'"),
    (config(surprise=1), "surprise"),
    ({"config": None}, "config with named values, got None"),
    ({"config": {}}, "missing .* 'variant'"),
    ({"pretrained_cfg": None}, "pretrained_cfg with named values, got None"),
    ({"pretrained_cfg": {"input_size": "xyz"}}, r"input_size \(3, height, width\), got 'xyz'"),
    ({"pretrained_cfg": {"crop_pct": 1.01}}, "crop_pct: expected at most 1, got 1.01"),
    ({"pretrained_cfg": {"input_size": [3, 0, 32]}}, "input_size: expected at least 1"),
    ({"pretrained_cfg": {"crop_mode": []}}, "crop_mode: expected 'center', 'squash' or 'bo"),
    ({"pretrained_cfg": {"mean": 5}}, "mean as a list of numbers, got 5"),
    ({"user": None}, "user with named values, got None"),
    ({"user": {"classes": ["a"]}}, "the names of 5 classes, got 1"),
    ({"user": {"classes": [1, 2, 3, 4, 5]}}, "classes as a list of names"),
    ({"user": {"labels": 3}}, "labels 'single' or 'multi', got 3"),
    ({"user": {"threshold": "0.5"}}, "threshold as a number from 0 to 1, got '0.5'"),
    (
        {"user": {"threshold": [0.5]}},
        r"threshold as a list of \d+ numbers from 0 to 1, got \[0.5\]",
    ),
    ({"user": {"x": torch.ones(1)}}, "no plain values"),
]
TENSORS = [
    (with_tensor("head.fc.bias", torch.empty(5, device="meta")), "float32 on meta"),
    (with_tensor("head.fc.bias", torch.zeros(5).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
    (with_tensor("head.fc.bias", torch.zeros(5).to_sparse()), "sparse_coo of torch.float32"),
    (with_tensor("head.fc.bias", None), "NoneType"),
    (with_tensor(7, torch.zeros(5)), "does not fit. .* Keys, 1 unknown: 7"),
    (with_tensor("body.layer1.9999999999.x", torch.zeros(1)), "does not fit|not a usable"),
    (with_tensor(STEM, torch.zeros(0, 48, 3, 3)), "only a part of a TResNet"),
    (with_tensor(STEM, torch.zeros(())), "only a part of a TResNet"),
    (WITHOUT_LAST, r"holds only a part of a TResNet \(stages 1-1-1-0"),
    (with_tensor(STEM, torch.zeros(5000, 48, 3, 3)), "not a usable TResNet.*width_factor"),
    (with_tensor("head.reduce.conv.weight", torch.zeros(())), "unknown: .*head.reduce.conv.weight"),
    (with_tensor("head.reduce.conv.weight", torch.zeros(0)), "unknown: .*head.reduce.conv.weight"),
    (with_tensor("body.conv1.bn.running_var", -torch.ones(2)), "negative variances"),
    (PUBLIC | {BLUR: torch.full((16, 1, 3, 3), 1 / 9)}, f"{BLUR} is not the 3x3 binomial blur"),
    (
        {key.replace(".0.0.", ".0.").replace(".0.1.", ".1."): t for key, t in NO_FILTER.items()},
        r"without a blur \(body.layer2.0.conv1.0.weight\)",
    ),
    (PUBLIC | {BLUR: torch.ones(())}, f"{BLUR} is not the 3x3 binomial blur"),
    (PUBLIC | {f"{CONV}.weight": PUBLIC[f"{CONV}.0.weight"]}, f"two tensors for one .*{CONV}"),
    (OURS | PUBLIC, "mixes timm's names .*with the TResNet authors' names"),
    (OF_ITSELF, "holds no weights: .* got a dict with the keys"),
    (torch.ones(3), "holds no weights: .* got Tensor"),
    ([torch.ones(3)], "holds no weights: .* got list"),
    ({}, r"holds no weights: .* got a dict with the keys \[\]"),
    ({"epoch": 3, "lr": 0.1}, r"got a dict with the keys \['epoch', 'lr'\]"),
    ({"student": OURS, "teacher": PUBLIC}, r"holds 2 TResNets.*student: \*, teacher: \*: save"),
    ({"a": {"b": OURS}, "c": PUBLIC | LAYER}, r"holds 2 TResNets.*c: \*, a: b: \*"),
    ({"ema": OURS, "x": {"ema": PUBLIC}, "y": NO_FILTER}, "3 .*ema: .*, y: .*, x: ema: "),
    ({"no_ema": OURS, "net": PUBLIC}, "holds 2 TResNets"),
    ({"net": OURS, 0: {"x": 1}, "0": {"x": 2}}, "holds two values under one name, 0"),
    (dict.fromkeys("ab", torch.ones(1)), r"not a TResNet: expected names .* got a, b"),
]


def test_metadata_at_the_ends_of_their_ranges_are_taken(tmp_path):
    at_the_ends = {"input_size": [3, 1, 1], "crop_pct": 1}
    torch.save(with_metadata(pretrained_cfg=at_the_ends, tag=[]), tmp_path / "a.pth")
    assert same(create(weights=tmp_path / "a.pth").state_dict(), tiny().state_dict())


@pytest.mark.parametrize(
    ("contents", "message"),
    [*((with_metadata(**changes), message) for changes, message in METADATA), *TENSORS],
)
def test_a_file_is_checked_before_anything_is_made_of_it(tmp_path, contents, message):
    path, model = tmp_path / "a.pth", tiny(seed=1)
    torch.save(contents, path)
    with pytest.raises(CheckpointError, match=rf"a\.pth:? (.|\n)*({message})"):
        create(weights=path)
    before = snapshot(model)
    with pytest.raises(CheckpointError):
        load_checkpoint(model, path)
    assert same(before, model.state_dict())


def test_deep_json(tmp_path):
    path, text = tmp_path / "a.safetensors", '{"user": ' + "[" * 100_000 + "]" * 100_000 + "}"
    safetensors.torch.save_file({"a": torch.ones(1)}, path, {"tresnet": text})
    with pytest.raises(CheckpointError, match=r"a.safetensors is not a readable safetensors file"):
        read_file(path)
