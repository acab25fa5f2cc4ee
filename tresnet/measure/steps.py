"""One training or inference step of a benchmark case on synthetic input."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tresnet.measure.cases import DTYPES, BenchCase
from tresnet.measure.macs import count_parameters
from tresnet.models.named import build_named, default_input_shape, split_name
from tresnet.models.padding import pad_channels
from tresnet.ops.unit_floats import unit_floats
from tresnet.steps.compiled import compile_model
from tresnet.surgery.fold import fold

OPTIMIZER = "SGD, learning rate 1e-3, momentum 0.9, weight decay 1e-4"
_TORCHVISION_CLASSES = 1000


class ScaledBytes(nn.Module):
    """A model that takes floats, fed bytes: one pass makes floats in [0, 1] of them, in their layout."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Keep the model and the type its images have."""
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W), uint8."""
        return self.model(unit_floats(images, dtype=self.dtype))


@dataclasses.dataclass
class PreparedStep:
    """A case made ready: `run()` does one step and returns a tensor whose values must be finite."""

    run: Callable[[], Tensor]
    parameters: int
    input_size: int


def prepare(case: BenchCase, training: bool, device: torch.device, seed: int) -> PreparedStep:
    """Build the model, its input and (for training) its optimizer on `device`.

    Args:
        case: a checked case.
        training: forward, loss, backward and update; else a forward pass in inference mode.
        device: where everything lives.
        seed: of the weights and the synthetic batch.
    """
    torch.manual_seed(seed)
    built = build_named(case.model, norm=case.norm)
    if case.impl is not None:
        built.set_impl(case.impl)  # pyright: ignore[reportCallIssue]
    size = default_input_shape(built)[-1] if case.input_size is None else case.input_size
    dtype = DTYPES[case.dtype] if case.cast == "pure" else torch.float32
    if case.recompute is not None:
        built.set_recompute(case.recompute)  # pyright: ignore[reportCallIssue]
    built.train(training)
    if case.pad:
        built = pad_channels(built, inplace=True)
    if case.fold:
        built = fold(built)
    built = built.to(device=device, dtype=dtype)
    model = built.to(memory_format=_layout(case))  # pyright: ignore[reportCallIssue]
    parameters = count_parameters(model)
    images, fed = _input(model, case, size, device, dtype)
    step_model = _compiled(fed, case, training)
    if training:
        run = _training_step(step_model, model, images, case, device)
    else:
        run = _inference_step(step_model, images, case, device)
    return PreparedStep(run, parameters, size)


def _layout(case: BenchCase) -> torch.memory_format:
    return torch.channels_last if case.channels_last else torch.contiguous_format


def _input(
    model: nn.Module, case: BenchCase, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, nn.Module]:
    """The batch, and the model with what it takes to be fed it."""
    shape = (case.batch_size, 3, size, size)
    if case.input == "float":
        images = torch.rand(shape, device=device)
        return images.to(dtype=dtype, memory_format=_layout(case)), model
    images = torch.randint(256, shape, dtype=torch.uint8, device=device)
    takes_bytes = case.channels_last and split_name(case.model)[0] == "tresnet"
    fed = model if takes_bytes else ScaledBytes(model, dtype)
    return images.contiguous(memory_format=_layout(case)), fed


def _compiled(model: nn.Module, case: BenchCase, training: bool) -> Callable[[Tensor], Tensor]:
    """The model, compiled for static shapes.

    dynamic=False, because a second batch size of a model would otherwise be compiled for any size.
    """
    if case.compile == "none":
        return model
    return compile_model(
        model,
        case.compile,  # pyright: ignore[reportArgumentType]
        training=training,
        freeze=case.freeze,
        recompute="none" if case.partitioner is None else "activations",
        dynamic=False,
    )


def _training_step(
    step_model: Callable[[Tensor], Tensor],
    model: nn.Module,
    images: Tensor,
    case: BenchCase,
    device: torch.device,
) -> Callable[[], Tensor]:
    classes = getattr(model, "num_classes", _TORCHVISION_CLASSES)
    targets = torch.randint(classes, (case.batch_size,), device=device)
    # The fused update keeps GradScaler's overflow check on the GPU, without a wait every step.
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=1e-3,
        momentum=0.9,
        weight_decay=1e-4,
        fused=device.type == "cuda",
    )
    scaler = torch.amp.GradScaler(device.type, enabled=case.dtype == "fp16")

    def run() -> Tensor:
        if case.compile != "none":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        with _autocast(case, device):
            loss = F.cross_entropy(step_model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return run


def _inference_step(
    step_model: Callable[[Tensor], Tensor], images: Tensor, case: BenchCase, device: torch.device
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        if case.compile != "none":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode(), _autocast(case, device):
            return step_model(images)

    return run


def _autocast(case: BenchCase, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, DTYPES[case.dtype], enabled=case.cast == "autocast")
