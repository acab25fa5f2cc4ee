"""One inference step: a model in evaluation mode, in the chosen precision and layout."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional

from tresnet.errors import InputError
from tresnet.settings import Compute, InferenceCompute, torch_dtype
from tresnet.steps.compiled import compile_model
from tresnet.steps.feed import Feed, reads_bytes
from tresnet.steps.graph import Capturer, CudaCapturer, GraphedForward, uses_graph
from tresnet.steps.hooks import StepHooks
from tresnet.surgery.folding import fold


class InferenceStep:
    """Moves batches to the device and gives a model's logits for them.

    Attributes:
        model: What computes: the given model, or a folded copy of it.
        feed: Moves a loader's batch to the device, as `__call__` wants it.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        device: torch.device,
        *,
        hooks: StepHooks | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        """Move the model to its device and layout.

        Args:
            model: The model, which may go on being trained where `compute` is a plain `Compute`.
            compute: Precision, layout, and whether to compile. An `InferenceCompute` may also
                convert the weights, fold and freeze them: they must not change after that. It alone
                may run as a CUDA graph.
            device: Where to compute.
            hooks: Looks on; None for nobody.
            say: Told how long compiling took, and of CUDA graphs; None for the log.

        Raises:
            ConfigError: A CUDA graph is asked for where there can be none.
            InputError: The model cannot be folded, or has complex numbers, of which a conversion
                would drop the imaginary part; the message says why.
        """
        self._compute = compute
        self._device = device
        self._hooks = hooks or StepHooks()
        dtype, freeze = torch.float32, False
        if isinstance(compute, InferenceCompute):
            dtype, freeze = torch_dtype(compute.dtype), compute.freeze
            for name, value in chain(model.named_parameters(), model.named_buffers()):
                if value.is_complex():
                    raise InputError(
                        f"expected real numbers to convert to {dtype}, got {value.dtype} in "
                        f"{name}: run the model without tresnet's inference step"
                    )
            model = model.to(device, dtype).eval()
            if compute.fold:
                model = fold(model)
        self.model = move_model(model, compute, device)
        keep_bytes = reads_bytes(model, compute)
        self.feed = Feed(compute, device, keep_bytes=keep_bytes, dtype=dtype)
        self._forward: Callable[[Tensor], Tensor] = self.model
        if compute.compile != "none":
            self._forward = compile_model(
                self.model, compute.compile, training=False, freeze=freeze, say=say
            )
        self._images = 0  # of the largest batch yet
        if isinstance(compute, InferenceCompute) and uses_graph(compute, device, hooks is None):
            self.capture_with(CudaCapturer(device), say)

    def capture_with(self, capturer: Capturer, say: Callable[[str], object] | None = None) -> None:
        """Replay batches of usual shapes as graphs from now on; see `GraphedForward`."""
        self._forward = GraphedForward(self._forward, self.model, capturer, say)

    @property
    def replayed(self) -> bool:
        """Whether the last batch was a CUDA graph's."""
        return isinstance(self._forward, GraphedForward) and self._forward.replayed

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (N, classes) in float32 of images (N, 3, H, W) from `feed`."""
        if self.model.training:
            self.model.eval()
        count = len(images)
        if self._compute.compile != "none":
            images = self._filled_up(images)
        with (
            torch.inference_mode(),
            self._hooks.during("forward"),
            self._compute.autocast(self._device),
        ):
            return self._forward(images).float()[:count]

    def _filled_up(self, images: Tensor) -> Tensor:
        """The last batch as large as the others: for another size the model is compiled again."""
        missing = self._images - len(images)
        if missing <= 0:
            self._images = len(images)
            return images
        return functional.pad(images, (0, 0, 0, 0, 0, 0, 0, missing))  # keeps the layout


def move_model(model: nn.Module, compute: Compute, device: torch.device) -> nn.Module:
    """The model itself, moved to the device and to the configured layout."""
    return model.to(device=device).to(memory_format=compute.memory_format)  # pyright: ignore[reportCallIssue]
