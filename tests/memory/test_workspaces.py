"""Workspaces of single kernels, counted by hand: expected bytes and upper bound."""

import pytest
import torch

from tresnet.memory.device import GIB
from tresnet.memory.workspaces import workspace_bytes

aten = torch.ops.aten
IMAGES, MAPS, Q = torch.empty(2, 4, 8, 8), torch.empty(2, 6, 8, 8), torch.empty(2, 3, 130, 40)
X, WEIGHTS = torch.empty(3, 5, 4), [torch.empty(7)]  # 240 bytes, 28 bytes
TIME_FIRST = torch.empty(5, 3, 4).transpose(0, 1)
CELL, REST = (WEIGHTS, 0, WEIGHTS[0], None, None), (None, None, None, None, True)


@pytest.mark.parametrize(
    ("kernel", "args", "expected"),
    [
        (aten.convolution, (IMAGES, torch.empty(6, 4, 1, 1)), (0, 8 * (2048 + 96 + 3072))),
        (aten.convolution, (MAPS, torch.empty(6, 1, 1, 1)), (0, 0)),  # depthwise
        (aten.convolution, (torch.empty(2**26, 4, 1, 1, device="meta"), MAPS), (0, GIB)),
        # dq in float32 and the sums of rows, of tiles of 128 rows and 32 columns
        (
            aten._scaled_dot_product_flash_attention_backward,
            (None, Q),
            (4 * 6 * 256 * 65, 4 * 6 * 256 * 65),
        ),
        # a sequence is copied unless time comes first in memory
        (aten._cudnn_rnn, (X, *CELL, *REST), (28 + 240, 8 * (240 + 28 + 3072))),
        (aten._cudnn_rnn, (TIME_FIRST, *CELL, *REST), (28, 8 * (240 + 28 + 3072))),
        (
            aten._cudnn_rnn_backward,
            (X, *CELL, MAPS, None, None, None, *REST),
            (28 + 240, 8 * (240 + 28 + 3072)),
        ),
    ],
)
def test_workspaces_are_known_or_bounded(kernel, args, expected):
    assert workspace_bytes(kernel.default, args, [MAPS]) == expected
