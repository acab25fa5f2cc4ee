"""Grad-CAM, which shows the regions of an image that support a class."""

import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tresnet.errors import needed
from tresnet.models.tresnet import TResNet
from tresnet.ops.unit_floats import unit_floats

if TYPE_CHECKING:
    from PIL.Image import Image

with needed("Grad-CAM", "cam"):
    from torchcam.methods import GradCAM
    from torchcam.utils import overlay_mask

_lock = threading.Lock()  # threads take turns, because GradCAM's hooks store only one's maps


def class_maps(model: TResNet, images: Tensor, classes: list[int]) -> list["Image"]:
    """Return a Grad-CAM picture of each image, in which red regions support the class most.

    `model` is in eval mode, not folded. `images` are uint8 (N, 3, H, W); `classes` are N indices.
    """
    from torchvision.transforms.functional import to_pil_image

    first = next(model.parameters())
    plainly = torch.autocast(first.device.type, enabled=False)  # also in the caller's autocast
    with _lock, plainly, torch.enable_grad(), GradCAM(model, "body.layer4") as cam:
        floats = unit_floats(images.to(first.device), dtype=first.dtype)
        (maps,) = cam(classes, model(floats))
    return [
        overlay_mask(to_pil_image(image), to_pil_image(cam_map.float().cpu(), "F"), alpha=0.5)
        for image, cam_map in zip(images, maps, strict=True)
    ]
