import pytest
import torch
from torch import nn

from tests.toys import same, small, small_public, snapshot, trained, zeros
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.fit import load_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.errors import CheckpointError, InputError
from tresnet.models.tresnet import feature_extractor
from tresnet.models.zoo import build


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pth"


def assert_refused(model, path, message, **kwargs):
    """The error matches and the model keeps every bit."""
    before, slopes = snapshot(model), (model.config.stem_slope, model.config.block_slope)
    with pytest.raises(CheckpointError, match=message) as info:
        load_checkpoint(model, path, **kwargs)
    assert same(before, model.state_dict())
    assert slopes == (model.config.stem_slope, model.config.block_slope)
    return str(info.value)


MEAN = "body.layer1.0.conv1.bn.running_mean"


def without(*names):
    tensors = trained(small(), seed=1).state_dict()
    return {key: value for key, value in tensors.items() if not key.endswith(names)}


def test_missing_counters_are_set_to_zero(path):
    torch.save(without("num_batches_tracked"), path)
    model = trained(small())
    load_checkpoint(model, path)
    assert model.body.conv1.bn.num_batches_tracked.item() == 0
    torch.save({name: tensor.half() for name, tensor in without().items()}, path)
    load_checkpoint(model, path)  # counts of half precision
    assert model.body.conv1.bn.num_batches_tracked.item() == 7


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.mark.parametrize("source", [small, small_public])
@pytest.mark.parametrize(("ema", "raw"), [("", ""), ("", "module."), ("module.", "")])
def test_an_ema_of_parameters_alone_gets_the_models_statistics(path, source, ema, raw, caplog):
    ours = trained(source(), seed=1).state_dict()
    parameters = {name: tensor / 2 for name, tensor in ours.items() if "running" not in name}
    shadow = {f"{ema}{n}": t for n, t in parameters.items() if not n.endswith(STATISTICS)}
    torch.save({"model": {f"{raw}{n}": t for n, t in ours.items()}, "ema": shadow}, path)
    found = create(weights=path).state_dict()
    assert f"ema: {ema}*, and the running statistics, which these lack, those named " in caplog.text
    torch.save(ours | parameters, path)
    expected = create(weights=path).state_dict()
    assert same(*({n: t for n, t in s.items() if "batches" not in n} for s in (found, expected)))


BLOCKS = "trained with block_size=4, the model has block_size=2: build a model with block_size=4"
SEVEN = (
    r"7 classes, .*\), expected .* 5 classes, .*new_head=True if only the head differs.*"
    r"head.fc.weight \(expected \(5, 512\), got \(7, 512\)\)"
)
HUGE = without() | {"body.conv1.bn.running_var": torch.full((16,), 7e4)}
LARGE = (
    r"holds tresnet_l \(stages 4-5-18-3, 76 base channels, .*\), expected a TResNet "
    r"\(stages 1-2-1-1, 16 base channels, .*\): build such a model"
)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (without(MEAN), {}, f"Keys, 1 missing: {MEAN}$"),
        ({"ema": without(*STATISTICS)}, {}, "has no running statistics, as an EMA of .*32 missing"),
        ({"ema": without(*STATISTICS)}, {"num_classes": 0}, "It has no running statistics"),
        ({"ema": without(*STATISTICS), "Teacher": without()}, {}, "It has no running statistics"),
        (small(), {"head": "ml_decoder"}, "head linear.*head ml_decoder.*or load all but"),
        (without("body.conv1.conv.weight"), {}, "Keys, 1 missing: body.conv1.conv.weight$"),
        (without("head.fc.weight", "head.fc.bias"), {}, "0 classes, .* 5 classes.* new_head=True"),
        (zeros(build("tresnet_l", device="meta").state_dict()), {}, LARGE),
        (small(), {"block_size": 2}, BLOCKS),
        (small(), {"block_size": 2, "in_chans": 12}, BLOCKS),  # 48 inputs, but of other pixels
        (small_public().state_dict(), {"block_size": 2}, BLOCKS),
        (small(block_size=2, in_chans=1).state_dict(), {}, "4 stem inputs.* 48 stem inputs"),
        (small(num_classes=7).state_dict(), {}, SEVEN),
        (HUGE, {"dtype": torch.float16}, "beyond .*: build the model in float32. Keys: .*_var$"),
    ],
)
def test_what_does_not_fit_is_refused(path, source, options, message):
    if isinstance(source, nn.Module):
        save_checkpoint(source, path)
    else:
        torch.save(source, path)
    assert_refused(small(**options), path, message)


def test_every_misfit_is_named(path):
    tensors = dict(trained(small(), seed=1).state_dict())
    del tensors["body.layer1.0.conv1.bn.bias"]
    del tensors["body.layer4.0.conv3.conv.weight"]
    tensors["body.layer1.0.conv1.bn.beta"] = torch.ones(16)
    tensors["neck.weight"] = torch.ones(16)
    tensors["body.layer1.0.se.fc1.bias"] = torch.ones(3)
    tensors["body.layer1.0.se.fc2.bias"] = torch.ones(16, dtype=torch.int64)
    torch.save(tensors, path)
    message = assert_refused(trained(small()), path, "a.pth does not fit")
    assert "2 missing: body.layer1.0.conv1.bn.bias, body.layer4.0.conv3.conv.weight;" in message
    assert "2 unknown: body.layer1.0.conv1.bn.beta, neck.weight;" in message
    assert "1 of another shape: body.layer1.0.se.fc1.bias (expected (64,), got (3,));" in message
    assert "1 of another kind of number: body.layer1.0.se.fc2.bias (torch.int64)" in message


def test_a_part_of_a_model_is_loaded_into_such_a_part(path):
    source, other = (feature_extractor(trained(small(), seed), [1, 2]) for seed in (0, 1))
    torch.save(source.state_dict(), path)
    load_checkpoint(other, path)
    assert same(source.state_dict(), other.state_dict())


@pytest.mark.parametrize("classes", [7, 0])
def test_a_new_head_needs_no_class_count(path, classes):
    torch.save(small(num_classes=classes).state_dict(), path)
    model = trained(small(), seed=3)
    head = model.head.fc.weight.clone()
    load_checkpoint(model, path, new_head=True)
    assert torch.equal(model.head.fc.weight, head)


def test_bfloat16_has_the_range_of_float32(path):
    torch.save(HUGE, path)
    load_checkpoint(small(dtype=torch.bfloat16), path)


def write_source(kind, path):
    """Save a 3-channel model, ours, timm's or public, and return it."""
    source = (small_public() if kind == "public" else trained(small())).eval()
    if kind == "ours":
        save_checkpoint(source, path)
    else:
        torch.save(source.state_dict(), path)
    return source


def test_a_stem_of_half_precision_is_summed_in_float32(path):
    source, model = trained(small(dtype=torch.bfloat16)), small(in_chans=1)
    torch.save(source.state_dict(), path)
    load_checkpoint(model, path)
    stem = source.body.conv1.conv.weight.float().unflatten(1, (16, 3)).sum(2)
    assert torch.equal(model.body.conv1.conv.weight, stem)


@pytest.mark.parametrize("kind", ["ours", "timm", "public"])
def test_one_channel_gives_what_gray_colours_give(path, kind):
    """Adapt three channels to one, and back."""
    source = write_source(kind, path)
    model = small(in_chans=1).eval()
    load_checkpoint(model, path)
    gray = torch.rand(2, 1, 64, 96)
    expected = source(gray.expand(-1, 3, -1, -1))
    torch.testing.assert_close(model(gray), expected, rtol=1e-4, atol=1e-5)
    save_checkpoint(model, path)
    back = small().eval()
    load_checkpoint(back, path)
    again = back(gray.expand(-1, 3, -1, -1))
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [2, 4, 7])
def test_other_channels_repeat_the_colours(path, channels):
    """Channel i acts as colour i % 3 does, times 3 / channels."""
    source = write_source("timm", path)
    model = small(in_chans=channels).eval()
    load_checkpoint(model, path)
    image = torch.rand(2, channels, 64, 96)
    rgb = torch.zeros(2, 3, 64, 96)
    for channel in range(channels):
        rgb[:, channel % 3] += image[:, channel] * 3 / channels
    torch.testing.assert_close(model(image), source(rgb), rtol=1e-4, atol=1e-5)


def test_inplace_abn_refuses_negative_gammas(path):
    pytest.importorskip("inplace_abn")
    tensors = dict(trained(small()).state_dict())
    for name in tensors:
        if name.endswith("bn.weight"):
            tensors[name] = tensors[name].abs()
    tensors["body.conv1.bn.weight"][3] = 0.0
    tensors["body.conv1.bn.weight"][4] = 5e-6
    torch.save(tensors, path)
    model = small(norm="inplace_abn")
    load_checkpoint(model, path)
    assert torch.equal(model.body.conv1.bn.weight[3:5], torch.full((2,), 1e-5))
    tensors["body.conv1.bn.weight"][3] = -1e-9
    tensors["body.layer3.0.conv3.bn.weight"][0] = -2.0
    torch.save(tensors, path)
    layers = "Keys: body.conv1.bn.weight, body.layer3.0.conv3.bn.weight$"
    assert_refused(model, path, f"negative gammas, which .* the model with norm='abn'. {layers}")


def test_a_failing_load_leaves_inplace_abn_weights_alone(path):
    """Asking for its state dict would rewrite the weights that an optimizer took below eps."""
    pytest.importorskip("inplace_abn")
    model = small(norm="inplace_abn")
    nn.init.constant_(model.body.conv1.bn.weight, -0.25)
    torch.save(small(num_classes=7).state_dict(), path)
    with pytest.raises(CheckpointError, match="7 classes"):
        load_checkpoint(model, path)
    assert torch.equal(model.body.conv1.bn.weight, torch.full((16,), -0.25))


def test_an_averaged_model_is_loaded_in_place_and_no_model_of_others(path):
    source, model = trained(small()), small().to(memory_format=torch.channels_last)
    save_checkpoint(source, path)
    model.body.conv1.requires_grad_(False)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    weight = averaged.module.body.layer1[0].conv1.conv.weight
    load_checkpoint(averaged, path)
    assert same(source.state_dict(), averaged.module.state_dict())
    assert averaged.module.body.layer1[0].conv1.conv.weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.requires_grad
    assert not averaged.module.body.conv1.conv.weight.requires_grad
    with pytest.raises(InputError, match=r"expected a TResNet from tresnet\.create, got Linear"):
        load_checkpoint(nn.Linear(1, 1), path)
