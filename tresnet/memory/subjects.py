"""The six subjects of the document whose formula and measurements the predictor is held to.

'GPU memory usage for deep learning image processing' (2023, torch 2.0.1, fp32, SGD, batch 128 of
3x224x224, ten classes as float targets; UNETR batch 8 of 1x64x64x64). The figures are what it
printed. Its notebook keeps every earlier model with its gradients on the GPU; `alone_mib` is its
peak less those leftovers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tresnet.errors import InputError, MissingDependencyError
from tresnet.memory.sizes import GIB

N_CLASSES = 10
TENSOR_BYTES = GIB


@dataclass(frozen=True)
class Subject:
    """One model of the document; the shapes include the batch."""

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    peak_mib: float
    end_mib: float
    reserved_mib: float
    alone_mib: float
    formula_mib: float

    @property
    def step(self) -> dict:
        """The arguments of `predict` that describe the document's step."""
        return {
            "batch_size": self.input_shape[0],
            "input_size": self.input_shape[1:],
            "target_size": self.target_shape[1:],
            "optimizer": "sgd",
        }


class SmallCnn(nn.Module):
    """3x3 conv to 8 channels, 2x2 average pool, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.pool = nn.AvgPool2d(2, 2)
        self.fc = nn.Linear(8 * 111 * 111, N_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of images (N, 3, 224, 224)."""
        return self.fc(self.pool(self.conv(x)).flatten(1))


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=N_CLASSES)

    return build


def _unetr() -> nn.Module:
    try:
        from monai.networks.nets.unetr import UNETR
    except ImportError as error:
        raise MissingDependencyError(
            "the UNETR subject needs monai: pip install 'tresnet[unetr]'"
        ) from error
    return UNETR(
        in_channels=1,
        out_channels=2,
        img_size=(64, 64, 64),
        feature_size=16,
        hidden_size=768,
        mlp_dim=3072,
        num_heads=12,
        proj_type="perceptron",
        norm_name="instance",
        res_block=True,
        dropout_rate=0.0,
    )


_IMAGES = (128, 3, 224, 224)
_CLASSES = (128, N_CLASSES)
_VOLUMES = (8, 1, 64, 64, 64)
_MASKS = (8, 2, 64, 64, 64)

SUBJECTS: dict[str, Subject] = {
    s.name: s
    for s in (
        Subject("cnn", SmallCnn, _IMAGES, _CLASSES, 530.9, 97.8, 604, 530.9, 635.8),
        Subject(
            "vgg16", _torchvision("vgg16_bn"), _IMAGES, _CLASSES,
            17231.9, 1125.1, 18752, 17224, 15929,
        ),
        Subject(
            "resnet50", _torchvision("resnet50"), _IMAGES, _CLASSES,
            11738.2, 1307.0, 12982, 10703, 11378,
        ),
        Subject(
            "vit_b_16", _torchvision("vit_b_16"), _IMAGES, _CLASSES,
            17218.1, 1967.2, 18142, 15999, 18678,
        ),
        Subject("unetr", _unetr, _VOLUMES, _MASKS, 5177.9, 2645.8, 9268, 3301, 5605),
    )
}  # fmt: skip


def find_subject(name: str) -> Subject:
    """A subject by name.

    Raises:
        InputError: there is none of that name.
    """
    if name not in SUBJECTS:
        raise InputError(f"expected a subject out of {', '.join(SUBJECTS)}, got {name!r}")
    return SUBJECTS[name]
