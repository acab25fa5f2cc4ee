"""The compiled forms: equal results, less kept for backward, and the warm-up on the log."""

import logging

import pytest
import torch

import tresnet
from tresnet.steps import compiled as module
from tresnet.steps.compiled import compile_model

pytestmark = pytest.mark.slow


def make():
    torch.manual_seed(0)
    return tresnet.create("tresnet_t", num_classes=5, layers=(1, 1, 1, 1), width_factor=0.125)


def kept(run, x):
    """Bytes of the feature maps that the compiled graph keeps for backward."""
    maps = [t for t in run(x).grad_fn.saved_tensors if t.dim() == 4 and t.shape[-1] > 1]
    weights = 3  # sides of the largest kernel
    return sum(t.numel() * t.element_size() for t in maps if t.shape[-1] > weights)


def test_training_equals_eager_and_keeps_less(monkeypatch, caplog):
    x = torch.rand(4, 3, 32, 32)
    model, reference = make(), make()
    run = compile_model(model, training=True)
    with caplog.at_level(logging.INFO):
        y = run(x)
    assert f"compiled in {run.warmup_s:.1f} s" in caplog.text
    y.square().sum().backward()
    expected = reference(x)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4)
    less = kept(run, x)
    monkeypatch.setattr(module, "TRAINING_PARTITIONER", {})
    torch.compiler.reset()
    assert less < 0.8 * kept(compile_model(make(), training=True), x)


def test_bytes_are_computed_as_the_floats_they_stand_for():
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    model = make().to(memory_format=torch.channels_last).eval()
    with torch.inference_mode():
        y = compile_model(model, training=False)(images)
        torch.testing.assert_close(y, model(images.float() / 255), rtol=1e-4, atol=1e-5)


def test_inference_equals_eager_with_frozen_weights():
    x = torch.rand(2, 3, 32, 32)
    model = tresnet.surgery.fold(make().eval())
    run = compile_model(model, training=False, freeze=True)
    with torch.inference_mode():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_training_cannot_freeze():
    with pytest.raises(ValueError, match="freeze=False in training"):
        compile_model(make(), training=True, freeze=True)
