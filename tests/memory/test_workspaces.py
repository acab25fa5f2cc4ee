"""Workspaces of single kernels, counted by hand: expected bytes and upper bound."""

import pytest
import torch

from tresnet.memory.device import GIB
from tresnet.memory.workspaces import workspace_bytes

IMAGES, MAPS = torch.empty(2, 4, 8, 8), torch.empty(2, 6, 8, 8)
MANY = torch.empty(2**26, 4, 1, 1, device="meta")
ROWS = 4 * 2 * 3 * 256  # in float32, 130 of them in tiles of 128; 40 columns in tiles of 32


@pytest.mark.parametrize(
    ("kernel", "args", "expected"),
    [
        ("convolution", (IMAGES, torch.empty(6, 4, 1, 1)), (0, 8 * (2048 + 96 + 3072))),
        ("convolution", (MAPS, torch.empty(6, 1, 1, 1)), (0, 0)),  # depthwise
        ("convolution", (MANY, MAPS), (0, GIB)),
        (
            *("_scaled_dot_product_flash_attention_backward", (None, torch.empty(2, 3, 130, 40))),
            (ROWS * (64 + 1), ROWS * (64 + 1)),
        ),
    ],
)
def test_workspaces_are_known_or_bounded(kernel, args, expected):
    assert workspace_bytes(getattr(torch.ops.aten, kernel).default, args, [MAPS]) == expected
