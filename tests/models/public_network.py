"""timm's TResNet, with the names and weights of the public TResNet code in its state dict."""

import torch
from timm.models.tresnet import TResNet

LINE = torch.tensor([1.0, 2.0, 1.0])


class PublicTResNet(TResNet):
    """A convolution and a norm are 0 and 1 of a Sequential; before a blur, they are 0 of another.

    A weight w of in-place ABN stands for gamma = |w| + eps.
    """

    def __init__(self, layers, planes, num_classes, v2=False, filters=False):
        super().__init__(list(layers), num_classes=num_classes, width_factor=planes / 64, v2=v2)
        self.filters, self.w = filters, {}

    @torch.no_grad()
    def use_inplace_abn(self):
        """Take the norms' weights for weights of in-place ABN, and set gammas to |w| + eps."""
        for name, weight in self.named_parameters():
            if name.endswith(".bn.weight"):
                self.w[name] = weight.clone()
                weight.abs_().add_(1e-5)
        return self

    def state_dict(self, **_):
        state = {}
        for name, tensor in super().state_dict().items():
            parent, part, kind = name.rsplit(".", 2)
            tensor = self.w.get(name, tensor)
            if part in ("conv", "bn"):
                blur = getattr(self.get_submodule(parent), "aa", None) is not None
                name = f"{parent}{'.0' * blur}.{int(part == 'bn')}.{kind}"
                if blur and self.filters and part == "conv":
                    filt = torch.outer(LINE, LINE).expand(len(tensor), 1, 3, 3) / 16
                    state[f"{parent}.1.op.filt"] = filt
            state[name] = tensor
        return state


@torch.no_grad()
def randomise(model, generator):
    """Give every tensor values that a training could give: norms' weights of 0 and below too."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("running_var"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        elif name.endswith(("running_mean", ".bias")):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
        elif tensor.dim() == 1:  # weights of norms
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            tensor[1::7] = 0.0
        elif name.endswith("num_batches_tracked"):
            tensor.fill_(5)
        elif tensor.dim() > 1 and not name.endswith("filt"):
            fan_in = tensor[0].numel()
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2 / fan_in) ** 0.5)
    return model
