"""Predict the likeliest classes of images, in PyTorch or from an exported file."""

import collections
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import Checkpoint, open_checkpoint
from tresnet.data.channels import ImageReader
from tresnet.data.transforms import transform_of
from tresnet.devices import usable_device
from tresnet.errors import InputError
from tresnet.models.tresnet import TResNet
from tresnet.models.zoo import image_size
from tresnet.predictions.pictures import Source
from tresnet.predictions.reader import Bad, ImageModel, outputs, raise_error
from tresnet.settings import Build, InferenceCompute
from tresnet.steps import InferenceStep
from tresnet.steps.compiled import Say, log
from tresnet.steps.outputs import present, probabilities, ranked, read_threshold

if TYPE_CHECKING:
    from PIL.Image import Image

Runtime = Literal["torch", "onnx"]


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one image, or those from a threshold, by decreasing probability.

    Attributes:
        image: Path or name of the image.
        classes: Names of the classes, such as 'class 7' if the weights have no names.
        probabilities: Probability of each class, in [0, 1].
        numbers: Index of each class, from 0.
        map: Grad-CAM picture of the likeliest class, or None without `maps=True`.
        short_names: `classes`, where a description that weights hold beside their classes' names,
            such as 'tench, Tinca tinca', ends at its first comma if the result is unique.
    """

    image: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    numbers: tuple[int, ...]
    map: "Image | None" = None
    short_names: tuple[str, ...] = ()


class _Backend(NamedTuple):
    images: ImageModel
    num_classes: int
    classes: tuple[str, ...] | None
    descriptions: tuple[str, ...] | None
    threshold: float | Sequence[float] | None  # that the weights hold
    several: bool  # whether an image may have several labels
    model: TResNet | None = None  # unfolded model, for Grad-CAM pictures; None for runtime onnx


class Predictor:
    """Loads weights once, and predicts the classes of any number of images."""

    def __init__(
        self,
        weights: str | os.PathLike[str] | Checkpoint,
        *,
        top_k: int | None = None,
        threshold: float | Sequence[float] | str | None = None,
        batch_size: int = 32,
        runtime: Runtime = "torch",
        maps: bool = False,
        device: str = "auto",
        build: Build | None = None,
        compute: InferenceCompute | None = None,
        say: Say = log,
        classes: Sequence[str] | None = None,
        max_image_pixels: int | None = None,
    ) -> None:
        """Load `weights` as `tresnet.create` does, or load an exported file for runtime 'onnx'.

        A prediction has the `top_k` likeliest classes, of those that have at least the probability
        `threshold`: a number, one for each class, or the path of a JSON file with one for each.
        Where both are None, weights of many labels predict all labels from the threshold that they
        hold, and others the likeliest class. With `maps`, a prediction has a Grad-CAM picture.
        `batch_size` images run together, in PyTorch on `device` ('auto': a GPU if there is one), or
        in onnxruntime on the CPU. `build` has settings of the model, and `compute` has settings of
        the inference step; with None, the defaults are used. `say` receives messages about
        compilation and CUDA graphs; the default logs the messages. `classes` are names of the
        outputs in place of those in the weights. Images of more than `max_image_pixels` are errors;
        with None, Pillow decides.

        Raises:
            InputError: a value is out of range, or the model does not classify RGB images.
            CheckpointError: the weights cannot be found or read, or are not finite.
            MissingDependencyError: torchcam (for `maps`) or onnxruntime is not installed.
        """
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        if runtime not in ("torch", "onnx"):
            raise InputError(f"expected runtime 'torch' or 'onnx', got {runtime!r}")
        count = 1 if top_k is None else top_k
        for name, value in (("top_k", count), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise InputError(f"expected {name} of at least 1, a whole number, got {value!r}")
        if maps and runtime != "torch":
            raise InputError("expected runtime 'torch' with maps, which need gradients")
        if runtime == "onnx":
            self._backend = _onnx(weights, classes, max_image_pixels)
        else:
            parts = build or Build(), compute or InferenceCompute()
            info = open_checkpoint(weights).named(classes)
            self._backend = open_torch(info, device, *parts, say, max_image_pixels)
        backend, self._batch_size = self._backend, batch_size
        if backend.several and (top_k, threshold) == (None, None):
            threshold = backend.threshold
        every = backend.num_classes if backend.several and threshold is not None else 1
        self._top_k = min(top_k or every, backend.num_classes)
        threshold = 0.0 if threshold is None else threshold
        self._threshold = read_threshold(threshold, backend.classes, backend.num_classes)
        numbered = tuple(f"class {number}" for number in range(backend.num_classes))
        self._names = backend.descriptions or backend.classes or numbered
        self._short_names = _short_names(self._names) if backend.descriptions else self._names
        self._class_maps = _class_maps(self.reader) if maps else None

    @property
    def reader(self) -> ImageReader:
        """How images are read: as 8-bit RGB, or with the channels of the weights."""
        return self._backend.images.reader

    def __call__(
        self, images: Source | Iterable[Source], bad: Bad = raise_error
    ) -> Iterator[Prediction]:
        """Yield predictions in the order of `images`; `predict` says what `images` may be.

        One thread per core reads images of the next batches. If an image cannot be read, `bad`
        receives the BadImageError, and the image is left out. For a batch with outputs that are not
        finite, `bad` receives an OutputError. Without `bad` the error is raised.
        """
        backend = self._backend
        for names, batch, logits in outputs(images, backend.images, self._batch_size, bad):
            chances = probabilities(logits, multi=backend.several)
            kept, numbers = present(chances, self._threshold), ranked(logits, self._top_k)
            maps: list[Any] = [None] * len(names)
            if self._class_maps is not None:
                maps = self._class_maps(backend.model, batch, numbers[:, 0].tolist())
            for row, (name, cam) in enumerate(zip(names, maps, strict=True)):
                indices = [number for number in numbers[row].tolist() if kept[row, number]]
                yield Prediction(
                    image=name,
                    classes=tuple(self._names[number] for number in indices),
                    probabilities=tuple(chances[row, indices].tolist()),
                    numbers=tuple(indices),
                    map=cam,
                    short_names=tuple(self._short_names[number] for number in indices),
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a spawned process make its own predictor, by the same arguments."""
        return partial(type(self), **self._arguments), ()


def _class_maps(reader: ImageReader) -> "Callable[..., list[Image]]":
    if not reader.rgb:
        raise InputError("expected weights for RGB with maps, which are drawn over the image")
    from tresnet.predictions.maps import class_maps

    return class_maps


def _short_names(descriptions: tuple[str, ...]) -> tuple[str, ...]:
    short = [text.partition(", ")[0] for text in descriptions]
    counts = collections.Counter(short)
    return tuple(
        name if counts[name] == 1 else whole
        for name, whole in zip(short, descriptions, strict=True)
    )


def predict(
    images: Source | Iterable[Source],
    *,
    weights: str | os.PathLike[str] | Checkpoint,
    top_k: int | None = None,
    **options: Any,
) -> list[Prediction]:
    """Predict the classes of images; `weights`, `top_k` and `options` are `Predictor`'s arguments.

    `images` is one image or an iterable of images, such as an array (N, H, W, 3). An image is a
    path, a PIL image, the bytes of an image file or an open file, or RGB in uint8: a NumPy array
    (H, W, 3) or a tensor (3, H, W). A path may name a folder or be a glob pattern. Images are
    resized and cropped as the weights require.

    Raises:
        InputError: an object is not an image.
        BadImageError: an image cannot be read.
        OutputError: outputs of an image are not finite.
    """
    return list(Predictor(weights, top_k=top_k, **options)(images))


def open_torch(
    info: Checkpoint,
    device_name: str,
    build: Build,
    compute: InferenceCompute,
    say: Say,
    max_pixels: int | None,
    *,
    features: bool = False,
) -> _Backend:
    """Open weights in PyTorch; with `features` the outputs are pooled features, not logits."""
    if info.num_classes == 0 and not features:
        raise InputError(f"expected weights of a classifier, but {info.name} has no classes")
    if features and not info.config.global_pool:
        raise InputError(
            f"expected weights with a global pool, but {info.name} was saved with global_pool='': "
            "save the model with another, such as tresnet.create(weights=FILE, global_pool='avg')"
        )
    reader = ImageReader.of(info.name, info.pretrained_cfg, max_pixels)
    device = usable_device(device_name)
    info.check_finite()
    outputs = 0 if features else None  # without a head, a model returns its pooled features
    model = create(weights=info, device=device, num_classes=outputs, **vars(build))
    assert isinstance(model, TResNet), "only features_only gives another class"
    cfg = info.pretrained_cfg
    step = InferenceStep(model, compute, device, say=say, normalised_by=cfg)
    return _Backend(
        images=ImageModel(
            run=lambda batch: step(step.feed.images(batch)),
            transform=transform_of(cfg, image_size(cfg)),
            reader=reader,
            compute=step.compute,
        ),
        num_classes=info.num_classes,
        classes=info.classes,
        descriptions=info.descriptions,
        threshold=info.user.get("threshold"),
        several=info.labels == "multi",
        model=model.eval(),
    )


def _onnx(path: object, names: Sequence[str] | None, max_pixels: int | None) -> _Backend:
    from tresnet.export.formats import read_onnx

    if not isinstance(path, str | os.PathLike):
        raise InputError(f"expected the path of an exported file, got {type(path).__name__}")
    run, metadata = read_onnx(Path(path))
    images = metadata["images"]
    cfg = {"input_size": [images["channels"]], "pixel_dtype": images.get("pixel_dtype")}
    reader = ImageReader.of(str(path), cfg, max_pixels)
    classes, descriptions = (
        None if metadata[key] is None else tuple(metadata[key])
        for key in ("classes", "descriptions")
    )
    if names is not None:
        if len(names) != metadata["num_classes"]:
            raise InputError(
                f"expected the names of the {metadata['num_classes']} classes of {path}, got "
                f"{len(names)}"
            )
        classes, descriptions = tuple(names), None
    return _Backend(
        images=ImageModel(run, transform_of(metadata["preprocessing"], images["size"]), reader),
        num_classes=metadata["num_classes"],
        classes=classes,
        descriptions=descriptions,
        threshold=metadata["threshold"],
        several=metadata["labels"] == "multi",
    )
