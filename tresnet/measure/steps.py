"""One training or inference step of a benchmark case on synthetic input."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tresnet.measure.cases import DTYPES, PARTITIONERS, BenchCase
from tresnet.measure.macs import count_parameters
from tresnet.measure.named import build_named, default_input_size
from tresnet.models.compiled import CompiledModel, partitioner
from tresnet.surgery.fold import fold
from tresnet.surgery.pad_channels import pad_channels

OPTIMIZER = "SGD, learning rate 1e-3, momentum 0.9, weight decay 1e-4"
_TORCHVISION_CLASSES = 1000


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
    built = build_named(case.model, case.norm)
    if case.impl is not None:
        built.set_impl(case.impl)  # pyright: ignore[reportCallIssue]
    size = default_input_size(built) if case.input_size is None else case.input_size
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    dtype = DTYPES[case.dtype] if case.cast == "pure" else torch.float32
    if case.output_recompute:
        built.set_output_recompute()  # pyright: ignore[reportCallIssue]
    built.train(training)
    if case.pad:
        built = pad_channels(built, inplace=True)
    if case.fold:
        built = fold(built)
    built = built.to(device=device, dtype=dtype)
    model = built.to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    images = torch.rand(case.batch_size, 3, size, size, device=device)
    images = images.to(dtype=dtype, memory_format=layout)
    parameters = count_parameters(model)
    step_model = _compiled(model, case)
    if training:
        run = _training_step(step_model, model, images, case, device)
    else:
        run = _inference_step(step_model, images, case, device)
    return PreparedStep(run, parameters, size)


def _compiled(model: nn.Module, case: BenchCase) -> Callable[[Tensor], Tensor]:
    """The model, compiled for static shapes.

    dynamic=False, because a second batch size of a model would otherwise be compiled for any size.
    """
    if case.compile == "none":
        return model
    if not case.freeze:
        function = torch.compile(model, mode=case.compile, dynamic=False)
        if case.partitioner is None:
            return function
        return CompiledModel(function, partitioner(PARTITIONERS[case.partitioner]))
    # torch.compile takes a mode or options, not both
    options = {**torch._inductor.list_mode_options(case.compile), "freezing": True}
    return torch.compile(model, options=options, dynamic=False)


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
