"""FoldedConv: what folding leaves of a convolution and its norm."""

import pytest
import torch
from torch import nn

from tests.surgery.networks import images, network
from tresnet.errors import InputError
from tresnet.layers.folded_conv import FoldedConv
from tresnet.surgery import fold


def test_the_folded_model_refuses_training():
    folded, x = fold(network()), images()
    before = folded(x)
    for part in (folded, next(m for m in folded.modules() if isinstance(m, FoldedConv))):
        with pytest.raises(InputError, match=r"for inference: train the model that was given"):
            part.train()
    assert torch.equal(folded(x), before)
    folded.eval()


@pytest.mark.parametrize("hooked", [True, False])
def test_the_activation_is_in_place_unless_a_hook_may_keep_its_input(hooked):
    made = []
    conv = nn.Conv2d(3, 4, 1)
    layer = FoldedConv(conv, 0.5, nn.Identity())
    conv.forward = lambda x: made.append(nn.Conv2d.forward(conv, x)) or made[0]
    if hooked:
        conv.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        y = layer(torch.randn(2, 3, 4, 4))
    assert (y is made[0]) != hooked
    assert (made[0].min() < y.min()) == hooked
