"""The comparison at first use: a wrong kernel makes its group plain, and nothing is disturbed."""

import math
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import keystr, tree_map_with_path

import tresnet
from tests.fused.models import RUNNERS, assert_near, images, make, plain
from tests.operators import Recorder
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tests.toys import smallest, step
from tresnet.errors import InputError
from tresnet.fused import Runner, first_use
from tresnet.fused.first_use import fill, run
from tresnet.models.tresnet import run_children
from tresnet.ops import epilogue, stem, verdict
from tresnet.ops.epilogue import Epilogue, definition
from tresnet.ops.launching import recorded_launches

WIDTH = 16  # of the norms of layer2, and of no other stage
STAGES = "layer1", "layer2"


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Compare kernels on any device, as if they had not been used yet."""
    monkeypatch.setattr(verdict, "_verdicts", {})
    monkeypatch.setattr(first_use, "_runs_kernels", lambda x: not isinstance(x, FakeTensor))


@pytest.fixture
def compared(monkeypatch):
    """Arguments of the comparisons that a test makes; nothing is computed in them."""
    calls = []
    monkeypatch.setattr(first_use, "run", lambda *args: calls.append(args))
    return calls


def larger(part):
    if part is None:
        return None
    return 255 - part if part.dtype == torch.uint8 else part * 1.1


def raises(_):
    raise RuntimeError("first line\nCannot find ptxas")


def make_wrong(patch, name, where="", change=larger):
    """Patch a function of `epilogue`: change the parts of its results for layer2 that are `where`.

    The results of other stages stay right.
    """
    original = getattr(epilogue, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        results, ours = original(*args, **kwargs), args[0]
        maps = ours if isinstance(ours, torch.Tensor) else args[1].y
        if maps.shape[1] != WIDTH and "pool" not in name:
            return results
        return tree_map_with_path(lambda at, x: change(x) if where in keystr(at) else x, results)

    patch.setattr(epilogue, name, run)


WRONG = {
    "output": ("forward", "[0]"),
    "values not written": ("forward", "[0]", lambda y: y * math.nan),
    "mask": ("forward", ".mask"),
    "statistics": ("forward", ".stats"),
    "gate": ("forward", ".gate"),
    "hidden layer": ("forward", ".hidden"),
    "recomputed output": ("gradient_sums", ".rebuilt"),
    "recomputed blur": ("rebuild",),
    "masked gradient": ("gradient_sums", ".masked_grad"),
    "gradients of parameters": ("gradient_sums", ".grads"),
    "missing gradient": ("gradient_sums", ".grads[0]", lambda grad: None),
    "gradient": ("gradient",),
    "pool": ("avg_pool",),
    "gradient of the pool": ("add_avg_pool_grad",),
    "error": ("gradient", "", raises),
}


def stages(model):
    return [(name, model.body.get_submodule(name)) for name in STAGES]


def gradients(runner, model):
    """Return a stage's output and gradients, all by name."""
    torch.manual_seed(3)
    dtype = next(model.parameters()).dtype
    x = torch.rand(2, 8, 6, 8).to(DEVICE, dtype, memory_format=torch.channels_last)
    y = run_children(stages(model), x.requires_grad_(), STAGES, runner=runner)["layer2"]
    parameters = {name: p for name, p in model.body.named_parameters() if name[:6] in STAGES}
    made = torch.autograd.grad(y.square().mean(), [x, *parameters.values()])
    return dict(zip(["y", "x", *parameters], [y.detach(), *made], strict=True))


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_makes_its_group_plain_and_no_other(what, monkeypatch):
    make_wrong(monkeypatch, *WRONG[what])
    model = make(layers=(1, 2, 1, 1))
    reason = "Cannot find ptxas" if what == "error" else r"off by|differs from|is missing"
    message = rf"layer2 runs as plain modules: its first use on .* failed \(.*({reason})"
    for _ in range(2):  # the second call finds what the first one found
        with pytest.warns(UserWarning, match=message) as warned:
            ours = gradients(RUNNERS["as on a GPU"], model)
        assert len(warned) == 1
    exact = plain(model)
    assert_near(ours, gradients(Runner("plain"), exact), 1e-4)
    with pytest.raises(InputError, match="impl='triton' cannot run layer2: its first use"):
        gradients(Runner("triton"), model)


def test_disabled_hooks_of_saved_tensors_make_no_kernel_wrong():
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        gradients(RUNNERS["triton"], make())
    assert set(verdict._verdicts.values()) == {None}  # compared, and right


def test_a_wrong_kernel_of_the_stem_is_not_used(monkeypatch):
    original = stem.input_by_kernel
    monkeypatch.setattr(stem, "input_by_kernel", lambda *args: original(*args) * 1.1)
    model, pixels = make("as on a GPU").eval(), (images() * 255).to(torch.uint8)
    model.body = model.body[:2]
    with pytest.warns(UserWarning, match="s2d runs as plain modules: its first use"):
        ours = model.forward_features(pixels)
    assert_near({"y": ours}, {"y": plain(model).forward_features(pixels)}, 1e-4)


def test_the_users_values_decide_nothing(monkeypatch):
    """In a new model, gammas are 0. On constant images, sums cancel. NaN differs from itself."""
    torch.manual_seed(0)
    model = smallest().to(DEVICE)
    assert not model.body.layer2[0].conv2.bn.weight.any()
    model.runner, model.body = Runner("triton"), model.body[:4]
    for value in (0.0, math.nan):
        model.forward_features(torch.full((2, 3, 24, 24), value, device=DEVICE))
        assert set(verdict._verdicts.values()) == {None}
        verdict._verdicts.clear()
    make_wrong(monkeypatch, "gradient_sums", ".grads")
    with pytest.raises(InputError, match="cannot run layer2"):
        gradients(Runner("triton"), model)


def test_the_comparison_disturbs_nothing(monkeypatch):
    """Compare a step with a first use in it with the same step later, bit for bit."""
    results, packed = [], []

    def pack(tensor):
        packed[-1] += 1
        return tensor

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    try:
        for _ in range(2):
            model, recorder = make(layers=(1, 1, 1, 1), drop_path_rate=0.5), Recorder()
            model.body = model.body[:4]
            packed.append(0)
            with recorder, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                result = step(model, images(side=24), run=model.forward_features)
            results.append((result, recorder.names(), torch.random.get_rng_state()))
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False
    assert len(verdict._verdicts) == 2
    (first, names, state), (later, later_names, later_state) = results
    assert all(torch.equal(first[name], later[name]) for name in later)
    assert first.keys() == later.keys()
    assert packed[0] == packed[1] > 0
    assert names == later_names
    assert torch.equal(state, later_state)


def test_a_users_error_and_an_interruption_are_no_verdict(monkeypatch):
    model, pixels = make("as on a GPU"), images(side=24)
    with pytest.raises(InputError, match="more than one value"):
        model(torch.rand(1, 3, 16, 16, device=DEVICE))
    assert set(verdict._verdicts.values()) == {None}
    before = len(verdict._verdicts)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(first_use, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.eval()(pixels)
    assert len(verdict._verdicts) == before


def test_groups_of_other_settings_are_compared_anew(compared, monkeypatch):
    def count(model, x=None, grad=True):
        compared.clear()
        with torch.set_grad_enabled(grad):
            model(images() if x is None else x)
        return len(compared)

    model, x = make(), images()
    assert count(model) == 4
    assert count(make(), images(batch=3, side=56)) == 0
    assert count(make(), images(side=42)) == 4  # odd sizes: pools and blurs treat them apart
    assert count(model, grad=False) == 4
    assert count(model.eval()) == 4
    with torch.autocast(DEVICE, torch.bfloat16):
        assert count(model, x) == 4
    model.train().set_grad_checkpointing()
    assert count(model) == 2  # the stem and a block alone; the other blocks are stages
    other = make()
    other.body.layer1[0].se = nn.Identity()
    other.body.layer2[0].conv1.bn.slope = None
    assert count(other) == 2
    monkeypatch.setattr(epilogue.passes, "SE_MAP", 0)
    assert count(make()) == 3  # on larger maps, other kernels run the groups with SE


def test_synthetic_maps_have_few_samples_but_values_enough(compared):
    samples = []
    for batch in (1, 20):
        with torch.no_grad():
            make()(images(batch=batch, side=16))
        samples.append([shape[0] for _, shape, *_ in compared])
        verdict._verdicts.clear()
        compared.clear()
    assert samples == [[2, 2, 2, 10], [16] * 4]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_kernels_to_compile_are_those_that_the_comparison_launches(mode, compared, monkeypatch):
    with mode():
        make().train(mode is torch.enable_grad)(images())
        monkeypatch.setattr(first_use, "run", run)
        for fused, shape, options, trains in compared:
            with verdict._undisturbed(torch.device(DEVICE)):
                fakes = first_use.launches_of(fused, shape, options._replace(ops=epilogue), trains)
            with recorded_launches() as launches:
                run(fused, shape, options, trains)
            assert {one.variant() for one in launches} == {one.variant() for one in fakes} != set()
    assert len(compared) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_value_of_a_synthetic_map_is_near_a_kink(dtype):
    """Its statistics may be its own, or a norm's in eval mode, whose mean is up to 1 / 16."""
    for count in (2, 3, 5, 64):
        y = torch.empty(1, 64, 1, count, dtype=dtype)
        fill(y)
        for gamma in (1, -1):
            beta = torch.full((64,), 1 / 16)
            stats = torch.stack((-beta, gamma / 1.5 + 0 * beta, 0 * beta, 0 * beta))
            for norm in (Epilogue(gamma + 0 * beta, beta), Epilogue(None, beta, stats)):
                assert definition.forward(y.double(), norm)[0].abs().min() > 0.1
        assert y.unique().numel() > 20
        assert y.mean((0, 2, 3)).abs().median() > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tresnet_m", "tresnet_xl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_of_a_whole_model_are_right(name, dtype):
    model = tresnet.create(name, impl="triton", device="cuda")
    pixels = torch.randint(256, (16, 3, 224, 224), dtype=torch.uint8, device="cuda")
    flags = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    for trains in (True, True, False):  # the second step is warm
        began_s = time.perf_counter()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = model.train(trains)(pixels)
        y.float().sum().backward()
        torch.cuda.synchronize()
        took_s, mib = time.perf_counter() - began_s, torch.cuda.memory_reserved() / 2**20
        sys.stdout.write(f"trains={trains}: {took_s:.2f} s, {mib:.0f} MiB reserved\n")
    assert flags == (torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
    assert set(verdict._verdicts.values()) == {None}
