"""The model as a module: inputs it refuses, transformations it survives, memory it keeps."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.fused.models import RUNNERS
from tests.live_storages import live_after
from tests.toys import NEEDS_PACKAGE, NORMS, small, smallest, snapshot, step
from tresnet.checkpoints.creation import create
from tresnet.errors import InputError, MissingDependencyError
from tresnet.models.tresnet import TResNet

OWN_NORMS = ["abn", "batchnorm"]


def make(norm="abn", **options):
    """Build a small model whose residual branches are alive."""
    model = smallest(norm=norm, num_classes=7, **options)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture
def images():
    return torch.rand(3, 3, 32, 24)


def assert_same_step(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        close = {} if "running" in name else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}", **close)


FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("weights", "pixels"),
    [
        *((FP32, dtype) for dtype in (torch.complex64, torch.int64, FP16, BF16)),
        *((FP32, FP64), (FP64, FP32)),  # which autocast leaves alone: a convolution would fail
    ],
)
def test_images_of_another_dtype_are_refused(images, weights, pixels, autocast):
    model, images = make().to(weights), images.to(pixels)
    with torch.autocast("cpu", BF16, enabled=autocast):
        if autocast and pixels in (FP16, BF16):
            assert model(images).dtype is BF16
            return
        message = f"expected images in {weights}, as the weights are, got {pixels}: convert with x"
        if FP64 not in (weights, pixels):
            message = rf"expected .*images.*, got {pixels}: convert"
        with pytest.raises(InputError, match=message):
            model(images)


def test_autocast_leaves_a_model_in_float64_alone():
    model = make().double().eval()
    pixels = torch.randint(256, (2, 3, 32, 24), dtype=torch.uint8)
    expected = model(pixels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(pixels), expected)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_smallest_image_of_each_block_size(block_size):
    """The stated minimum works, and one block less is refused by us rather than deep inside."""
    model = make(block_size=block_size).eval()
    assert model(torch.rand(1, 3, 5 * block_size, 5 * block_size)).shape == (1, 7)
    message = rf"at least {5 * block_size}, got \({4 * block_size}, {5 * block_size}\)"
    with pytest.raises(InputError, match=message):
        model(torch.rand(1, 3, 4 * block_size, 5 * block_size))


def test_missing_package_names_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "inplace_abn", None)
    monkeypatch.setitem(__import__("sys").modules, "inplace_abn.functions", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*inplace-abn==1\.1\.0"):
        create("tresnet_t", norm="inplace_abn")


@pytest.mark.parametrize(("norm", "jit"), [("abn", False), ("batchnorm", True)])
def test_script_and_trace(images, norm, jit):
    model = make(norm, jit=jit)
    scripted = torch.jit.script(model)
    expected = step(copy.deepcopy(model), images)
    assert_same_step(step(model, images, scripted), expected)
    expected = model.eval()(images).detach()
    torch.testing.assert_close(scripted.eval()(images), expected)
    torch.testing.assert_close(torch.jit.trace(model, images)(images), expected)


@pytest.mark.filterwarnings("ignore:The TorchScript type system")  # of fx's own GraphModule
@pytest.mark.parametrize(
    ("norm", "options"),
    [
        ("abn", {}),
        ("batchnorm", {"jit": True, "global_pool": "avgmax"}),
        pytest.param("inplace_abn", {}, marks=NEEDS_PACKAGE),
        ("abn", {"head": "ml_decoder"}),
        ("abn", {"head": "group_attention", "head_groups": [2, 3]}),
    ],
    ids=str,
)
def test_a_traced_model_is_the_model_with_its_gradients_and_scripts(norm, options):
    model = small(norm=norm, **options).train()
    graph = torch.fx.symbolic_trace(model)
    x = torch.rand(2, 3, 64, 96)
    model.eval()  # whose modules the graph calls
    expected = model(x)
    assert torch.equal(graph.eval()(x), expected)
    assert graph(torch.rand(3, 3, 64, 64)).shape == (3, 5)  # no size is fixed
    if "head" not in options:
        scripted = torch.jit.script(graph)
        torch.testing.assert_close(scripted(x), expected, rtol=1e-5, atol=1e-5)
    state, steps = snapshot(model), []
    for called in (model, graph):
        torch.manual_seed(0)  # of dropout
        steps.append(step(model, x, called.train()))
        model.load_state_dict(state)  # the running statistics
    torch.testing.assert_close(*steps, rtol=1e-6, atol=1e-6)


def rebuilt(model):
    """Build the model without memory, then give it the weights: no stray buffers."""
    empty = TResNet(model.config, device="meta")
    assert all(tensor.is_meta for tensor in [*empty.parameters(), *empty.buffers()])
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    return empty


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), rebuilt]
)
def test_copies_after_use(images, norm, copied):
    model = make(norm, jit=True)
    expected = copy.deepcopy(step(model, images))
    other = copied(model)
    assert other.config == model.config
    for buffer, value in other.named_buffers():
        assert torch.equal(value, model.get_buffer(buffer))
    with torch.no_grad():
        assert torch.equal(other.eval()(images), model.eval()(images))
    assert all(torch.equal(expected[name], p.grad) for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"norm": "batchnorm", "jit": True}, {"impl": "triton"}], ids=["plain", "kernels"]
)
def test_models_compile_into_one_graph(images, options):
    """Compile models with scripted helpers or Triton kernels: both compile as plain modules."""
    torch._dynamo.reset()
    model = make(**options)
    expected = step(copy.deepcopy(model), images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_step(step(model, images, compiled), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options", [{"impl": "triton"}, pytest.param({"norm": "inplace_abn"}, marks=NEEDS_PACKAGE)]
)
def test_export_with_a_dynamic_batch(images, options):
    model = make(**options).eval()
    program = torch.export.export(
        model, (images,), dynamic_shapes={"x": {0: torch.export.Dim("n")}}
    )
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(name.startswith(("aten.", "<built-in")) for name in names), names
    larger = torch.rand(5, 3, 32, 24)
    torch.testing.assert_close(program.module()(larger), model(larger), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["auto", "definitions"])
def test_transforms_of_torch_func(images, impl):
    """Gradients, directional derivatives and gradients of each sample, as from the engine."""
    model = make().double().eval()
    model.runner = RUNNERS[impl]
    images = images.double()
    parameters = dict(model.named_parameters())

    def loss(values, x):
        return torch.func.functional_call(model, values, (x,)).square().sum()

    values = {name: p.detach() for name, p in parameters.items()}
    direction = {name: torch.randn_like(p) for name, p in values.items()}
    _, slope = torch.func.jvp(lambda v: loss(v, images), (values,), (direction,))
    samples = torch.func.vmap(torch.func.grad(lambda v, x: loss(v, x[None])), (None, 0))
    each = samples(values, images)
    grads = torch.func.grad(loss)(values, images)
    expected = torch.autograd.grad(loss(parameters, images), list(parameters.values()))
    for name, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(grads[name], value, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(each[name].sum(0), value, rtol=1e-7, atol=1e-7)
    total = sum((direction[k] * v).sum() for k, v in zip(parameters, expected, strict=True))
    torch.testing.assert_close(slope, total)


@pytest.mark.parametrize("norm", NORMS)
def test_activation_checkpointing(images, norm):
    """Checkpointing changes neither gradients nor running statistics, and saves memory."""
    plain, checkpointed = make(norm), make(norm)
    checkpointed.load_state_dict(plain.state_dict())
    checkpointed.set_grad_checkpointing()
    expected = step(copy.deepcopy(plain), images)
    logits = checkpointed(images)
    loss = logits.square().mean()
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()  # runs the blocks again
    gradients = {name: p.grad for name, p in checkpointed.named_parameters()}
    found = {"logits": logits.detach(), **gradients, **dict(checkpointed.named_buffers())}
    assert_same_step(found, expected)
    assert kept_bytes(checkpointed, images) < 0.6 * kept_bytes(plain, images)


def kept_bytes(model, images):
    alive = live_after(lambda: model(images), [images, *model.parameters(), *model.buffers()])
    return sum(size for _, size in alive)


@NEEDS_PACKAGE
def test_abn_keeps_the_least():
    """Measured bytes alive after the forward pass, per image, of each norm."""
    images = torch.rand(2, 3, 64, 64).to(memory_format=torch.channels_last)
    models = {
        norm: make(norm).to(memory_format=torch.channels_last)  # else weights are copied
        for norm in [*OWN_NORMS, "inplace_abn"]
    }
    models["abn"].runner = RUNNERS["definitions"]
    kept = {norm: kept_bytes(model, images) for norm, model in models.items()}
    assert kept["abn"] < 0.73 * kept["batchnorm"]
    assert kept["abn"] < 0.95 * kept["inplace_abn"]


def test_drop_path_drops_branches():
    torch.manual_seed(1)
    model = make(drop_path_rate=0.9).train()
    rates = [getattr(b.drop_path, "drop_prob", 0.0) for s in list(model.body)[2:] for b in s]
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.9)
    assert rates == sorted(rates)
    images = torch.rand(4, 3, 32, 32)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_step_equals_cpu(images, norm, dtype):
    if norm == "inplace_abn" and dtype is torch.bfloat16:
        pytest.skip("inplace-abn has no bfloat16 kernels for CUDA")
    model = make(norm)
    expected = step(copy.deepcopy(model), images)
    model = model.cuda().to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        y = model(images.cuda().to(memory_format=torch.channels_last))
    y.float().square().mean().backward()
    found = {name: p.grad.cpu() for name, p in model.named_parameters()}
    both = [torch.cat([tensors[name].flatten() for name in found]) for tensors in (found, expected)]
    bound = 0.999 if dtype is torch.float32 else 0.97
    assert torch.cosine_similarity(*both, dim=0) > bound
