import argparse
import itertools
import json
import os
import pickle

import pytest
import safetensors.torch
import torch

from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.locate import from_layout
from tresnet.checkpoints.read import read_file
from tresnet.errors import CheckpointError

TENSORS = {"body.conv1.conv.weight": torch.ones(2, 3), "head.fc.bias": torch.zeros(4)}


def assert_reads(path, expected=TENSORS):
    found = read_file(path)[0]
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def save(path, metadata=None):
    """`TENSORS` in the format that the suffix names."""
    if path.suffix == ".safetensors":
        said = None if metadata is None else {"tresnet": json.dumps(metadata)}
        safetensors.torch.save_file(TENSORS, path, said)
    else:
        torch.save({"state_dict": TENSORS, "tresnet": metadata}, path)


class Payload:
    """Calls a function when unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def named(prefix):
    return {f"{prefix}{key}": value + 1 for key, value in TENSORS.items()}


OURS = named("")
COMPILED = {key.replace("body.", "body._orig_mod."): value for key, value in OURS.items()}
OPTIMIZER = {"state": {key: {"momentum": TENSORS[key]} for key in TENSORS}, "lr": 0.1}
LIGHTNINGS_EMA = {"current_model_state": TENSORS, "averaging_state": {}}
STEPS = {"initted": torch.tensor(True), "step": torch.tensor(7)}
FSDP = "_fsdp_wrapped_module._checkpoint_wrapped_module."
WEIGHT = {"criterion.weight": torch.ones(2)}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (OURS, ""),
        ({"model": OURS}, ""),
        ({"state_dict": OURS, "epoch": 3, "optimizer": {"state": {}, "lr": 0.1}}, ""),
        ({"state_dict": {"x": torch.ones(1)}, "state_dict_ema": OURS}, "left out: state_dict: x"),
        ({"model": {"state_dict": OURS}}, ""),
        ({"": {"": OURS}, "epoch": 3}, ""),
        (named("module."), "those named module.*"),
        ({"model": named("module._orig_mod.")}, "model: module.*"),
        ({"state_dict": OURS, "args": argparse.Namespace(lr=0.1, model="tresnet_m")}, ""),
        ({"optimizer": OPTIMIZER, "net": OURS}, "net: *; left out: optimizer: state: body.conv1"),
        (
            {"ema": {"shadow_params": [torch.ones(2)] * 9}, "net": OURS},
            "ema: shadow_params: * (9 t",
        ),
        (COMPILED, ""),
        # Lightning, its EMA, torchvision's references, transformers, a module with an EMA
        ({"state_dict": {**named("model."), **WEIGHT}}, "state_dict: model.*; left out: cr"),
        ({"state_dict": named("net._orig_mod.")}, "state_dict: net.*"),
        (
            {"state_dict": named("net."), **LIGHTNINGS_EMA},
            "left out: current_model_state: ",
        ),
        (
            {"model": TENSORS, "model_ema": {"n_averaged": torch.ones(()), **named("module.")}},
            "model_ema: module.*; left out: model: *, n_averaged",
        ),
        (named("timm_model."), "are those named timm_model.*"),
        ({"net": OURS, "args": argparse.Namespace(head=torch.ones(3))}, "left out: args: head"),
        # FSDP with checkpointed blocks, fastai, ema_pytorch
        ({k.replace("conv1.", f"{FSDP}conv1.{FSDP}"): v for k, v in OURS.items()}, ""),
        ({"model": OURS, "opt": {"state": [{"grad_avg": torch.ones(2)}]}}, "left out: opt: state"),
        (
            {**named("ema_model."), **{f"online.{k}": TENSORS[k] for k in TENSORS}, **STEPS},
            "named ema_model.*; left out: online.*, initted, step",
        ),
        ({**TENSORS, **named("ema.module.")}, "named ema.module.*; left out: *"),
    ],
)
def test_checkpoints_of_trainers(tmp_path, caplog, contents, said, zipped):
    path = tmp_path / "a.ckpt"
    torch.save(contents, path, _use_new_zipfile_serialization=zipped)
    assert_reads(path, OURS)
    assert said in caplog.text if said else not caplog.text


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "a"])
def test_contents_decide_not_the_suffix(tmp_path, name):
    safetensors.torch.save_file(TENSORS, tmp_path / name)
    assert_reads(tmp_path / name)


# torch's safe unpickler knows no other protocols, and no dict of protocol 0
@pytest.mark.parametrize(
    ("how", "kind"),
    [*itertools.product(["zip", "legacy", 1, 2, 3, 4, 5], ["open", "system"]), ("zip", "Linear")],
)
@pytest.mark.parametrize("inside", [True, False])
def test_code_is_refused_and_not_run(tmp_path, how, inside, kind):
    path, created = tmp_path / "a.pth", tmp_path / "created"
    payload = {
        "open": Payload(open, str(created), "w"),
        "system": Payload(os.system, f"touch {created}"),
        "Linear": torch.nn.Linear(1, 1),
    }[kind]
    contents = {"state_dict": payload} if inside else payload
    if isinstance(how, int):
        path.write_bytes(pickle.dumps(contents, protocol=how))
    else:
        torch.save(contents, path, _use_new_zipfile_serialization=how == "zip")
    known = rf"a.pth holds code .*\.{kind}\).*not opened: ask"
    message = "a.pth is not a readable torch file" if how in (4, 5) else known
    with pytest.raises(CheckpointError, match=message):
        read_file(path)
    assert not created.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    "damage", [0.02, 0.5, 0.99, b"", b"hello, world", b"\0" * 100, b"PK"], ids=str
)
def test_a_truncated_file_and_garbage(tmp_path, suffix, damage):
    path = tmp_path / f"a{suffix}"
    save(path)
    data = path.read_bytes()
    path.write_bytes(damage if isinstance(damage, bytes) else data[: int(len(data) * damage)])
    with pytest.raises(CheckpointError, match=f"a{suffix} is not a readable.*copy or dow") as info:
        read_file(path)
    assert "weights_only" not in str(info.value)  # torch advises to switch it off


def test_a_program_is_no_file_of_weights(tmp_path):
    layer = torch.nn.Linear(1, 1)
    torch.jit.trace(layer, torch.ones(1, 1)).save(str(tmp_path / "a.pt"))
    torch.export.save(torch.export.export(layer, (torch.ones(1, 1),)), tmp_path / "b.pt2")
    for path in tmp_path.iterdir():
        with pytest.raises(
            CheckpointError, match=rf"{path.name} is no file of torch.save: of a scr"
        ):
            read_file(path)


def write_parts(folder, files):
    """Write the tensors of each file, and transformers' index of all."""
    index = {}
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def test_a_model_in_several_files_is_read_by_its_index(tmp_path):
    (first, one), (second, two) = TENSORS.items()
    path = write_parts(tmp_path, {"1.safetensors": {first: one}, "2.safetensors": {second: two}})
    assert_reads(path)
    assert from_layout(str(tmp_path)) == (path, None)
    safetensors.torch.save_file({second: two, "head.odd": two + 1}, tmp_path / "2.safetensors")
    with pytest.raises(
        CheckpointError, match=r"2.safetensors does not hold the tensors that model"
    ):
        read_file(path)
    for damage in ("{", "{}", '{"weight_map": {"a": "../1.safetensors"}}', '{"weight_map": {}}'):
        path.write_text(damage)
        with pytest.raises(CheckpointError, match=r"index.json is not a readable index file"):
            read_file(path)


@pytest.mark.parametrize("name", ["nothing.pth", "directory", "pipe"])
def test_what_is_no_file(tmp_path, name):
    """A pipe is refused without waiting for it."""
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"no file of weights at .*: check the path"):
        read_file(tmp_path / name)


@pytest.mark.parametrize("metadata", [{"format_version": 3}, {}, ["x"], {"format_version": "1"}])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_metadata_of_a_later_version(tmp_path, metadata, suffix):
    path = tmp_path / f"a{suffix}"
    save(path, metadata)
    with pytest.raises(CheckpointError, match=r"reads up to 2\): upgrade tresnet"):
        open_checkpoint(path)
