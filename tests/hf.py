"""Make Hugging Face data sets with `datasets`, without this package's writer."""

from pathlib import Path

import pytest

from tresnet.data.dataset import ImageDataset


def as_dataset(folder: ImageDataset):
    """Return a folder's images as a data set, made without this package's writer."""
    datasets = pytest.importorskip("datasets")
    paths = [Path(path) for path in folder.paths]
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=folder.classes)}
    columns = {"image": images, "label": folder.targets.tolist()}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))
