"""The runner: what it chooses, runs in inference, writes into norms, and survives."""

import copy
import io
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tresnet
from tests.fused.models import assert_near, images, make, plain
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tests.toys import smallest, step
from tresnet.errors import InputError
from tresnet.fused import Runner, implementation
from tresnet.fused.block_specs import EvalNorm
from tresnet.fused.execution import eval_stats, update_running_stats
from tresnet.layers.conv_norm_act import ConvNormAct
from tresnet.layers.norm import ABN, FrozenRunningStats
from tresnet.models.tresnet import Part
from tresnet.ops.launching import recorded_launches
from tresnet.surgery import fold


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("folds", [None, "fold", "merge_stem"])
def test_inference_is_one_pass_between_two_convolutions(folds, dtype):
    model = make().eval()
    if folds:
        model = fold(model, merge_stem=folds == "merge_stem")
    model = model.to(dtype).to(memory_format=torch.channels_last)
    exact = copy.deepcopy(model).double()
    exact.runner = None
    with torch.no_grad(), Recorder() as recorder, recorded_launches() as launches:
        ours = model.forward_features(images(dtype)).double()
    with torch.inference_mode():
        assert torch.equal(model.forward_features(images(dtype)).double(), ours)
        expected = exact.forward_features(images(dtype).double())
    assert (ours - expected).norm() <= 3 * torch.finfo(dtype).eps * expected.norm()
    names = recorder.names()
    kernels = [one.kernel.__name__.removesuffix("_blurred") for one in launches]
    assert names.count("convolution") == kernels.count("apply") == 14
    assert not {"add", "add_", "leaky_relu_", "relu_", "reflection_pad2d"} & set(names)


def test_inference_takes_bytes():
    pixels = (images() * 255).to(torch.uint8)
    model = make("definitions").eval()
    for which in (model, fold(model), fold(model, merge_stem=True)):
        with torch.inference_mode():
            ours = which(pixels)
            which.runner = None
            torch.testing.assert_close(ours, which(pixels.float() / 255), rtol=1e-4, atol=1e-5)


def norms(*settings):
    """ABNs of several widths, momentums and dtypes, with statistics of their own."""
    made = [ABN(width, momentum=momentum).to(DEVICE, dtype) for width, momentum, dtype in settings]
    for norm in made:
        for value in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
            value.uniform_(0.5, 2)
    return made


def test_commit_writes_what_each_norm_alone_would():
    """Padded statistics are cropped; a call for each momentum and dtype updates all its norms."""
    ours = norms(
        (5, 0.1, torch.float32), (8, 0.1, torch.float32), (3, 0.3, torch.float32),
        (4, 0.1, torch.bfloat16), (2, 0.1, torch.float32), (6, 0.0, torch.float32),
        (3, 0.1, torch.float16),
    )  # fmt: skip
    ours[4].track_running_stats = False
    exact, stats = [copy.deepcopy(norm).double() for norm in ours], []
    for norm in exact:
        x = torch.randn(4, len(norm.weight), 3, 3, dtype=torch.float64, device=DEVICE) * 2 + 1
        x *= 300 if norm is exact[-1] else 1  # a variance over 65504, the largest float16
        norm(x)
        var, mean = torch.var_mean(x, (0, 2, 3))
        of_norm = torch.stack((mean, mean * math.nan, mean * math.nan, var)).float()
        stats.append(nn.functional.pad(of_norm, (0, -len(mean) % 8)))
    before = [copy.deepcopy(norm.state_dict()) for norm in ours]
    with FrozenRunningStats():
        update_running_stats(ours, stats)
    for norm, state in zip(ours, before, strict=True):
        torch.testing.assert_close(dict(norm.state_dict()), dict(state), rtol=0, atol=0)
    with Recorder() as recorder:
        update_running_stats(ours, stats)
    assert recorder.names().count("_foreach_lerp_") == 5  # groups of momentum and dtype
    for norm, expected in zip(ours, exact, strict=True):
        tolerance = 1e-6 if norm.weight.dtype == torch.float32 else 1e-2
        for name, value in expected.named_buffers():
            buffer = norm.get_buffer(name).to(value.dtype)
            torch.testing.assert_close(buffer, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_eval_stats_are_those_of_each_plain_norm(dtype):
    ours = norms((5, 0.1, dtype), (8, 0.1, dtype), (3, 0.3, dtype))
    ours[1].eps, tolerance = 0.1, 1e-12 if dtype == torch.float64 else 1e-5
    specs = [EvalNorm(-1, index, norm) for index, norm in enumerate(ours)]
    for norm, stats in zip(ours, eval_stats(specs, [norm.weight for norm in ours]), strict=True):
        exact = copy.deepcopy(norm).double().eval()
        exact.slope = None
        x = torch.randn(4, len(norm.weight), 3, 3, dtype=torch.float64, device=DEVICE)
        mean, scale, invstd, var = (row[:, None, None] for row in stats.double())
        y = (x - mean) * scale + exact.bias[:, None, None]
        torch.testing.assert_close(y, exact(x), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(invstd, (var + norm.eps).rsqrt(), rtol=tolerance, atol=0)


def saved_and_loaded(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def replicate_on_cpu(model):
    """Copy each module as `nn.DataParallel` does: its weights are attributes, no parameters."""
    copies = {id(module): module._replicate_for_data_parallel() for module in model.modules()}
    for module in model.modules():
        children = {name: copies[id(child)] for name, child in module.named_children()}
        weights = {name: p if p is None else p * 1 for name, p in module._parameters.items()}
        for name, part in {**children, **weights, **module._buffers}.items():
            setattr(copies[id(module)], name, part)
    return copies[id(model)]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "data parallel": replicate_on_cpu,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_model_run_the_program_but_those_of_data_parallel(how):
    model = make()
    copied = COPIES[how](model)
    assert copied.runner == Runner("triton")
    with recorded_launches() as launches:
        assert_near({"y": copied(images())}, {"y": plain(model)(images(torch.float64))}, 1e-4)
    assert bool(launches) == (how != "data parallel")


def without_stage(model):
    model.body.layer1 = nn.Identity()
    model.body.layer2 = make(layers=(1, 1, 1, 1)).body.layer2


def without_space_to_depth(model):
    del model.body.s2d
    conv = model.body.conv1.conv
    model.body.conv1.conv = nn.Conv2d(3, conv.out_channels, 3, padding=1, bias=False).to(DEVICE)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("change", [without_stage, without_space_to_depth])
def test_changed_bodies_return_what_plain_modules_do(change, checkpoints):
    model = make("definitions").eval()
    change(model)
    exact = plain(model)
    model.set_grad_checkpointing(checkpoints)
    x = (images() * 255).byte()
    maps = [which.forward_intermediates(x, [-4, -1])[1] for which in (model, exact)]
    for one, other in zip(*maps, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_a_folded_stage_behind_one_that_trains_runs_plainly():
    model = make("fallback").eval()
    model.body.layer2 = fold(model).body.layer2.requires_grad_(False)
    exact = step(plain(model), images(torch.float64))
    with pytest.warns(UserWarning, match="layer2 runs as plain modules: folded norms have no"):
        assert_near(step(model, images()), exact, 1e-4)


def test_a_stem_of_another_width_is_an_error():
    model = make("definitions", in_chans=4, width_factor=0.25)
    model.body.conv1 = make(in_chans=3, width_factor=0.25).body.conv1
    with pytest.raises(RuntimeError, match="to have 12 channels, but got 16"):
        model(torch.rand(2, 4, 40, 48, device=DEVICE))


def test_a_gpu_runs_float64_by_plain_modules_which_are_neither_read_nor_checked(monkeypatch):
    def read(*_):
        raise LookupError

    monkeypatch.setattr(Runner, "_read", read)
    conv, wide = ([Part("conv1", ConvNormAct(3, 8, 3).to(d))] for d in (torch.float, torch.double))
    with FakeTensorMode():  # a GPU without one
        x = torch.empty(2, 3, 8, 8, device="cuda")
        for impl in ("auto", "triton"):
            with pytest.raises(LookupError):
                Runner(impl)(conv, x, ())
        assert Runner()(wide, x.double(), ()) is None
        with pytest.raises(InputError, match=r"got torch.float64: use impl="):
            Runner("triton")(wide, x.double(), ())


@pytest.mark.parametrize("impl", ["fallback", "plain"])
def test_hooks_of_a_checkpointed_stage_are_called(impl):
    model, seen = make(impl), []
    model.set_grad_checkpointing()
    model.body.layer2.register_forward_hook(lambda *_: seen.append("layer2"))
    with pytest.warns(UserWarning, match="hook") if impl == "fallback" else nullcontext():
        model(images())
    assert seen == ["layer2"]


TRACERS = {
    "script": torch.jit.script,
    "fx": fx.symbolic_trace,
    "trace": lambda model: torch.jit.trace(model, images(), check_trace=False),
    "make_fx": torch.no_grad()(lambda model: make_fx(model)(images() + 1)),
    "export": lambda model: torch.export.export(model, (images(),)).module(),
}


@pytest.mark.parametrize("how", TRACERS)
def test_traced_models_are_plain(how):
    model = make().eval()
    expected = plain(model)(images(torch.float64)).float()
    with recorded_launches() as launches:
        traced = TRACERS[how](model)
        torch.testing.assert_close(traced(images()), expected, rtol=1e-4, atol=1e-5)
    assert not launches


def test_models_of_features_run_the_program():
    torch.manual_seed(0)
    model = smallest(impl="triton", features_only=True).to(DEVICE)
    with recorded_launches() as launches:
        maps = model(images())
    assert launches
    model.model.runner = None
    torch.testing.assert_close(maps, model(images()), rtol=1e-3, atol=1e-4)


def test_empty_batches_run_plainly():
    with recorded_launches() as launches:
        assert make().eval()(images()[:0]).shape == (0, 5)
    assert not launches


@pytest.mark.parametrize(
    ("runner", "dtype", "norm", "expected"),
    [
        (None, torch.float32, "abn", "plain modules"),
        (Runner("plain"), torch.float32, "abn", "plain modules"),
        (Runner(), torch.float32, "batchnorm", "because the norms are NormAct"),
        (Runner("triton"), torch.float64, "abn", "computes float32, bfloat16 and float16, got"),
        (Runner("triton"), torch.bfloat16, "abn", "Triton kernels"),
        pytest.param(
            Runner(), torch.float32, "abn", "because impl='auto' runs no kernels on cpu",
            marks=pytest.mark.skipif(DEVICE != "cpu", reason="of a CPU"),
        ),
    ],
)  # fmt: skip
def test_what_runs_a_model_is_said(runner, dtype, norm, expected):
    model = tresnet.create("tresnet_t", norm=norm, device="meta")
    model.runner = runner
    assert expected in implementation(model, torch.device(DEVICE), dtype)


def test_parts_that_run_plainly_are_said_while_they_do():
    model, device = make("as on a GPU").eval(), torch.device(DEVICE)
    hook = model.body.layer2.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="layer2 runs as plain modules"):
        model(images(side=16))
    model.runner = Runner("triton")  # whose kernels could run on this device
    expected = "Triton kernels, but plain modules for body.layer2 (Sequential has hooks)"
    assert implementation(model, device, torch.float32) == expected
    hook.remove()
    model(images(side=16))
    assert implementation(model, device, torch.float32) == "Triton kernels"
