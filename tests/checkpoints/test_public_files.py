"""Files that others have published: each loads whole, and gives the logits of its authors' code."""

import random
import re

import pytest
import timm.models.tresnet
import torch
from timm.layers.ml_decoder import MLDecoder, add_ml_decoder_head

from tests.checkpoints.public_files import DESCRIBED, rebuild, values
from tests.toys import small, trained
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.load import load_checkpoint
from tresnet.checkpoints.weights import open_weights
from tresnet.errors import CheckpointError
from tresnet.models.heads import _DecoderLayers
from tresnet.models.zoo import build

TRANSFORMER, FRELU = "Q2L-TResL-448", "TResnet-D-FLq_ema_6-30000"
QUICK = ("MS_COCO_TRresNet_M_224_81.8", "newabn_m_COCO", "tresnet_m_COCO_224_84_2", TRANSFORMER)
WHOLE = [name for name in DESCRIBED if name != FRELU]
FILES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WHOLE]
LIMIT = 600  # characters of an error


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pth"


@pytest.mark.parametrize("name", FILES)
def test_the_outputs_are_those_of_the_authors_code(path, name, caplog):
    file = rebuild(name)
    torch.save(file.contents, path)
    options = {}
    if name == TRANSFORMER:
        with pytest.raises(
            CheckpointError, match=r"num_classes=0.*module\.transformer\.\*"
        ) as info:
            create(weights=path)
        assert len(str(info.value)) <= LIMIT
        options = {"num_classes": 0}
    model = create(weights=path, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        found = model.forward_features(file.images) if options else model(file.images)
    assert "transformer" in caplog.text or not options
    found = found.flatten(1)[:, : file.logits.shape[1]]
    assert float((found - file.logits).abs().max()) < 1e-6 * file.std
    classes = open_weights(path).classes
    assert classes is None or classes == tuple(f"name {i}" for i in range(model.num_classes))
    assert (classes is None) == ("NAMES" not in DESCRIBED[name]["form"].values())


@pytest.mark.parametrize(("classes", "groups"), [(5, -1), (37, 5), (1000, -1)])
def test_timms_ml_decoder_is_loaded(path, classes, groups):
    peer = timm.models.tresnet.TResNet([1, 2, 1, 1], num_classes=classes, width_factor=0.25)
    peer = add_ml_decoder_head(peer)
    if groups > 0:
        peer.head = MLDecoder(classes, groups, initial_num_features=512)
    peer.head.decoder = _DecoderLayers(peer.head.decoder.layers)  # for torch's later versions
    torch.save({"state_dict": trained(peer).state_dict()}, path)
    model = create(weights=path).eval()
    config = model.config
    assert (config.head, config.head_channels, config.num_classes) == ("ml_decoder", 768, classes)
    assert config.head_queries == (None if groups < 0 else groups)
    x = torch.rand(2, 3, 64, 96)
    torch.testing.assert_close(model(x), peer.eval()(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match=f"has {classes} classes, got num_classes=9"):
        create(weights=path, num_classes=9)
    model = create(weights=path, num_classes=9, new_head=True)
    assert (model.config.head, model.num_classes) == ("ml_decoder", 9)


def test_unknown_heads_are_named_until_only_the_body_is_wanted(path, caplog):
    state = small().state_dict()
    layers = {f"head.mlp.{i}.{name}": torch.ones(2) for i in range(9) for name in ("w", "b")}
    body = {name: tensor for name, tensor in state.items() if name.startswith("body.")}
    for contents in ({**body, **layers}, {"model": body, "classifier": {"w": torch.ones(2)}}):
        torch.save(contents, path)
        named = r"head\.mlp\.\* \(18 tensors\)" if "model" not in contents else "classifier: w"
        for options in ({}, {"num_classes": 5}, {"head": "ml_decoder"}):
            with pytest.raises(CheckpointError, match=f"num_classes=0, or .* unknown: {named}"):
                create(weights=path, **options)
        with pytest.raises(CheckpointError, match=f"unknown: {named}"):
            load_checkpoint(small(), path)
        for options in ({"num_classes": 0}, {"num_classes": 7, "new_head": True}):
            caplog.clear()
            create(weights=path, **options)
            assert re.search(f"left out: {named}", caplog.text)


def test_frelu_is_refused_in_three_lines(path):
    torch.save(rebuild(FRELU).contents, path)
    with pytest.raises(CheckpointError, match="holds activations FReLU") as info:
        create(weights=path)
    assert len(str(info.value)) < 300


def cut_down(name):
    """The tensors of a published file with only the first block of each stage, all zero."""
    tensors = {}
    for blocks, lines in DESCRIBED[name]["tensors"]:
        for block in blocks.split(" "):
            if re.search(r"layer\d\.[1-9]", block):
                continue
            for line in lines.split(" "):
                key, kind, *shape = (block + line).split("|")
                size = list(map(int, shape))
                if kind == "blur":
                    tensors[key] = values(key, size, kind)
                else:
                    dtype = torch.int64 if kind == "counter" else torch.float32
                    tensors[key] = torch.zeros((), dtype=dtype).expand(size)
    return tensors


ODD = [lambda key: f"{key}x", lambda key: f"x{key}", lambda key: ".x".join(key.rsplit(".", 1))]


@pytest.mark.parametrize("name", WHOLE)
def test_a_renamed_tensor_is_named_in_an_error(path, name):
    """No tensor of any format is dropped because its name is unknown."""
    tensors, chance = cut_down(name), random.Random(name)
    torch.save(tensors, path)
    config = open_weights(path).config
    model = build(config.variant, **config.options, device="meta")
    options = {"num_classes": 0} if name == TRANSFORMER else {}
    inside = [key for key in tensors if "body." in key or not options]
    for key in chance.sample(sorted(inside), 8):
        odd = chance.choice(ODD)(key)
        torch.save({odd if key == old else old: v for old, v in tensors.items()}, path)
        for load in (lambda: create(weights=path, **options), lambda: load_checkpoint(model, path)):
            with pytest.raises(CheckpointError) as info:
                load()
            assert len(str(info.value)) <= LIMIT
            named = odd, f"{odd.rpartition('body.')[0]}*"  # the second of a body of one tensor
            assert any(name in str(info.value) for name in named), key
