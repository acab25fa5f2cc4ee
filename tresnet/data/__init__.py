"""Data: images in class folders, transforms, loaders, and the digits of scikit-learn."""

from tresnet.data import digits
from tresnet.data.folder import ImageDataset, check_same_classes, load_rgb, open_folder
from tresnet.data.loaders import Loader, create_loader
from tresnet.data.pictures import BadImageError
from tresnet.data.transforms import Augment, eval_transform, train_transform

__all__ = [
    "Augment",
    "BadImageError",
    "ImageDataset",
    "Loader",
    "check_same_classes",
    "create_loader",
    "digits",
    "eval_transform",
    "load_rgb",
    "open_folder",
    "train_transform",
]
