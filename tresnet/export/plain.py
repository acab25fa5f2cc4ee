"""Copy a model for export: norms are folded, and blurs become average pools."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tresnet.errors import InputError
from tresnet.export.image_spec import Images
from tresnet.layers.blur_pool import BlurPool2d
from tresnet.models.tresnet import TResNet
from tresnet.surgery.folding import fold


class BlurByPools(nn.Module):
    """Two average pools that compute `BlurPool2d`, without a padded copy of the input.

    The first pool takes means of two neighbours, and the second pool takes means of two such means.
    Together they apply the filter [1, 2, 1] / 4 with stride 2. At a reflected border, the two means
    would be equal, so the second pool ignores its padding and returns the one mean that exists.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, ceil(H/2), ceil(W/2))."""
        means = F.avg_pool2d(x, 2, stride=1)
        return F.avg_pool2d(means, 2, stride=2, padding=1, count_include_pad=False)


class InHalf(nn.Module):
    """A model in float16 that reads images as `model` does and returns logits in float32."""

    def __init__(self, model: nn.Module) -> None:
        """Convert the parameters of `model`, which is changed, to float16."""
        super().__init__()
        self.model = model.half()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, C, H, W), floats or uint8, to logits (N, classes)."""
        return self.model(images if images.dtype == torch.uint8 else images.half()).float()


def plain_model(model: nn.Module) -> TResNet:
    """Fold a copy of a float32 TResNet and insert `BlurByPools`; other models raise InputError."""
    if not isinstance(model, TResNet):
        raise InputError(
            f"expected a TResNet from tresnet.create that gives logits, got {type(model).__name__}"
        )
    weight = next(model.parameters())
    if weight.is_meta:
        raise InputError("expected weights with values, got the meta device: build on the CPU")
    if weight.dtype != torch.float32:
        raise InputError(
            f"expected weights in float32, got {weight.dtype}: call model.float() first"
        )
    plain = fold(model, merge_stem=True)
    plain = plain.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    for parent in list(plain.modules()):
        for name, child in parent.named_children():
            if isinstance(child, BlurPool2d):
                parent.register_module(name, BlurByPools())
    return plain


def trace(plain: nn.Module, images: Images, device: torch.device) -> ExportedProgram:
    """Trace the model for any number of images and, if `images.dynamic_size`, for any size.

    The program refuses sizes that `images` excludes.
    """
    example = images.prepare(images.random(2)).to(device)
    shape: dict[int, Any] = {0: Dim("batch", min=1)}
    if not images.dynamic_size:
        with torch.no_grad():
            return torch.export.export(plain, (example,), dynamic_shapes=(shape,))
    least = images.least // images.multiple
    for dim, name in ((2, "height"), (3, "width")):
        shape[dim] = images.multiple * Dim(f"{name}_blocks", min=least)

    def check_size(_module: nn.Module, args: tuple[Tensor]) -> None:
        # Without this check, the program would accept sizes that are not multiples. The check is of
        # tensors, because the tracer drops checks of integers: its `Dim`s always are multiples.
        for side in args[0].shape[2:]:
            divisible = torch.scalar_tensor(side, dtype=torch.int64) % images.multiple == 0
            torch._assert_async(divisible, f"expected sizes divisible by {images.multiple}")

    with torch.no_grad(), plain.register_forward_pre_hook(check_size):
        return torch.export.export(plain, (example,), dynamic_shapes=(shape,))
