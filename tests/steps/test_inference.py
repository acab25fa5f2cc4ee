"""An inference step refuses what a conversion of its dtype would change."""

import pytest
import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.steps import InferenceCompute, InferenceStep


def test_complex_numbers_are_not_made_real():
    model = nn.Conv2d(3, 1, 1)
    model.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
    with pytest.raises(InputError, match=r"got torch.complex64 in phase"):
        InferenceStep(model, InferenceCompute(fold=False), torch.device("cpu"))
