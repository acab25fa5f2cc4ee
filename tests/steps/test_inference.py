"""An inference step refuses what a conversion of its dtype would change."""

import pytest
import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.settings import InferenceCompute
from tresnet.steps import InferenceStep, inference


def test_complex_numbers_are_not_made_real():
    model = nn.Conv2d(3, 1, 1)
    model.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
    with pytest.raises(InputError, match=r"got torch.complex64 in phase"):
        InferenceStep(model, InferenceCompute(fold=False), torch.device("cpu"))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_smaller_last_batch_is_no_other_size_to_a_compiled_model(monkeypatch, channels_last):
    shapes, model = [], nn.Conv2d(3, 1, 1)

    def compiled(module, mode, *, training, **_):
        assert (mode, training) == ("default", False)
        return lambda x: shapes.append((x.shape, x.stride())) or module(x)

    monkeypatch.setattr(inference, "compile_model", compiled)
    compute = InferenceCompute(compile="default", channels_last=channels_last, fold=False)
    step = InferenceStep(model, compute, torch.device("cpu"))
    for count in (3, 2, 1):
        images = step.feed(torch.rand(count, 3, 4, 5), torch.zeros(count))[0]
        torch.testing.assert_close(step(images), model(images))
    assert len(set(shapes)) == 1
