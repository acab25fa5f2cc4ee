"""Batch norm over the images of all processes, with the activation our norms include."""

from torch import Tensor, nn
from torch.nn import functional

from tresnet.layers.norm import NormAct


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


def synchronise(model: nn.Module) -> nn.Module:
    """Replace every norm of `model` by its synchronised form, in place, and return the model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NormAct):
                setattr(parent, name, SyncNormAct(child))
    return model
