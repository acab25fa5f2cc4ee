"""Batch norm over the images of all processes, with the activation our norms include.

Where the fused kernels run, they share their statistics; elsewhere PyTorch's module takes over.
"""

from torch import Tensor, nn
from torch.nn import functional

from tresnet.layers.norm import ABN, NormAct


class SyncNormAct(nn.SyncBatchNorm):
    """PyTorch's synchronised batch norm, then leaky ReLU; parameters named as in `NormAct`."""

    def __init__(self, norm: NormAct) -> None:
        """Take over the parameters, statistics and settings of `norm`."""
        weight = norm.weight
        super().__init__(
            norm.num_features, norm.eps, norm.momentum, device=weight.device, dtype=weight.dtype
        )
        self.load_state_dict(norm.state_dict())
        self.slope = norm.slope

    def forward(self, input: Tensor) -> Tensor:
        """Normalise and activate (N, C, H, W)."""
        x = super().forward(input)
        return x if self.slope is None else functional.leaky_relu(x, self.slope)


def synchronise(model: nn.Module, example: Tensor, compiles: bool) -> nn.Module:
    """Let every norm of `model` share its statistics, in place, and return the model.

    Args:
        model: on its device.
        example: any tensor of the dtype and device of the activations.
        compiles: `torch.compile` follows, which takes PyTorch's module.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ABN) and not compiles and child.fuses(example):
                child.synchronised = True
            elif isinstance(child, NormAct):
                setattr(parent, name, SyncNormAct(child))
    return model
