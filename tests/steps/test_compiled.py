"""The compiled forms: equal results, less kept for backward, and the warm-up on the log."""

import logging
import re
from typing import get_args

import pytest
import torch

from tests.toys import smallest
from tresnet.errors import InputError
from tresnet.fused import Runner
from tresnet.settings import CompileMode
from tresnet.steps import compiled as module
from tresnet.steps.compiled import compile_model
from tresnet.surgery import fold


def make():
    torch.manual_seed(0)
    return smallest()


def saved_bytes(run, x):
    """Bytes of the feature maps that the compiled graph keeps for backward."""
    y = run(x)  # held, or PyTorch 2.11 frees what it saved
    maps = [t for t in y.grad_fn.saved_tensors if t.dim() == 4 and t.shape[-1] > 1]
    weights = 3  # sides of the largest kernel
    return sum(t.numel() * t.element_size() for t in maps if t.shape[-1] > weights)


def assert_trains_alike(run, model, reference, x):
    y = run(x)
    y.square().sum().backward()
    expected = reference(x)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4)


@pytest.fixture
def without_code(monkeypatch):
    """Graphs are divided and decomposed as always, but no machine code is generated for them."""
    compiler, backend = torch.compile, "aot_eager_decomp_partition"
    monkeypatch.setattr(torch, "compile", lambda model, **_: compiler(model, backend=backend))


@pytest.mark.slow
def test_training_equals_eager_and_keeps_less(without_code, caplog):
    x = torch.rand(4, 3, 32, 32)
    model = make()
    run = compile_model(model, training=True)
    with caplog.at_level(logging.INFO):
        assert_trains_alike(run, model, make(), x)
    assert re.search(r"compiled in \d+\.\d s", caplog.text)
    less = saved_bytes(run, x)
    torch.compiler.reset()
    own = make()
    own.runner = Runner(recompute="none")
    assert saved_bytes(compile_model(own, training=True), x) > less / 0.8


@pytest.mark.slow
def test_training_by_generated_code_equals_eager():
    """Compile only the stem and a block: the C++ code of all stages takes 90 s to compile."""
    pool = torch.nn.AdaptiveAvgPool2d(1)
    model, reference = (torch.nn.Sequential(*make().body[:3], pool) for _ in range(2))
    run = compile_model(model, training=True, recompute="activations")
    assert_trains_alike(run, model, reference, torch.rand(4, 3, 32, 32))


@pytest.mark.slow
def test_inference_on_bytes_with_frozen_weights_equals_eager():
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    model = fold(make().to(memory_format=torch.channels_last).eval())
    run = compile_model(model, training=False, freeze=True)
    with torch.inference_mode():
        expected = model(images.float() / 255)
        torch.testing.assert_close(run(images), expected, rtol=1e-4, atol=1e-5)


def test_modes_with_graphs_of_their_own_hand_out_copies(monkeypatch):
    """The next call overwrites what a CUDA graph puts out."""
    out, model, said = torch.zeros(2, 5), torch.nn.Identity(), []
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda x: out)
    run = compile_model(model, "reduce-overhead", training=False, say=said.append)
    assert run(out) is not out
    assert run(out) is not out
    assert len(said) == 1
    assert re.fullmatch(r"compiled in \d+\.\d s", said[0])
    assert compile_model(model, training=False)(out) is out
    assert set(module.CUDA_GRAPH_MODES) <= set(get_args(CompileMode))
    with pytest.raises(ValueError, match="freeze=False in training"):
        compile_model(model, training=True, freeze=True)


@torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)
def test_more_sizes_than_the_compiler_takes_are_an_error(without_code):
    torch._dynamo.reset()  # what other tests have compiled counts too
    run = compile_model(torch.nn.Conv2d(3, 5, 32).eval(), training=False)
    with torch.no_grad():
        assert run(torch.rand(1, 3, 32, 32)).shape == (1, 5, 1, 1)
        assert run(torch.rand(2, 3, 32, 32)).shape == (2, 5, 1, 1)
        with pytest.raises(
            InputError, match=r"at most 2 shapes of images .* got one more: \[3, 3, 32, 32\]"
        ):
            run(torch.rand(3, 3, 32, 32))
    assert not torch._dynamo.config.fail_on_recompile_limit_hit
