#!/usr/bin/env python3
"""Time tresnet_m's fused operations, eager PyTorch, Inductor and a copy, and write a record.

    python benchmarks/ops.py abn abn_blur --batch-size 128

Each operation runs in training mode on channels-last maps, with the sizes that it has in tresnet_m
for images of --input-size. The copy moves as many bytes as an ideal implementation, so memory
bandwidth lets no implementation be faster than the copy. Calls alternate between so many buffers
that the GPU's L2 cache cannot hold them. `tests/ops` checks results.
"""

import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import tyro
from annotated_types import Ge
from torch import Tensor
from tyro.conf import Positional

from tresnet import devices
from tresnet.cli import shell
from tresnet.cli.output import progress, report
from tresnet.measure import runner
from tresnet.measure.records import RecordFile
from tresnet.measure.settings import RoundCount, RunSettings
from tresnet.measure.throughput import clock_for
from tresnet.ops import epilogue
from tresnet.ops.blur import blur_pool
from tresnet.settings import Dtype, torch_dtype
from tresnet.settings.fields import Size

TIMES_CACHE = 3  # total size of the maps of all buffers, as a multiple of the L2 cache's size
MOST_BUFFERS = 16  # the host waits once about a thousand kernels are queued on a GPU
# A kernel of a few microseconds ends before Python has queued the next kernel. Therefore all calls
# are queued behind a kernel that waits for this many cycles, about 10 ms.
WAIT_CYCLES = 2**24


class Site(NamedTuple):
    """Operation at one place of the model; its maps have 1/`reduction` of the image's side."""

    op: str
    place: str
    channels: int
    reduction: int
    se: int = 0  # hidden channels of squeeze-and-excitation; 0: none


# The heaviest operation comes first, in case the measurement is cut short.
SITES = [
    Site("abn_join", "stage 1", 64, 4, se=64),
    Site("abn_join", "stage 2", 128, 8, se=64),
    Site("abn_join", "stage 3 outer", 1024, 16),
    Site("abn_join", "stage 4 outer", 2048, 32),
    Site("abn", "stage 1", 64, 4),
    Site("abn", "stage 2", 128, 8),
    Site("abn", "stage 3 inner", 256, 16),
    Site("abn", "stage 4 inner", 512, 32),
    Site("abn_blur", "into stage 2", 128, 4),
    Site("abn_blur", "into stage 3", 256, 8),
    Site("abn_blur", "into stage 4", 512, 16),
    Site("abn_se", "stage 3 inner", 256, 16, se=128),
]
# Least reads and writes of maps of the input's size, and of maps of the output's size.
#   abn       Forward reads x for the statistics, then reads x and writes y. Backward reads x and
#             grad_y for BN's sums, then reads both again and writes grad_x.
#   abn_blur  As abn, but y and grad_y have a quarter of the pixels.
#   abn_se    Forward reads x once more, for the mean of activations that SE needs.
#   abn_join  Forward reads the shortcut too. SE needs no read: without an activation, BN's
#             statistics give its mean. Backward writes the shortcut's gradient, and reads it in
#             place of grad_y for grad_x. The ReLU's mask, a bit per value, is left out.
IDEAL = {
    "abn_join": {"forward": (3, 1), "backward": (5, 1)},
    "abn": {"forward": (2, 1), "backward": (4, 1)},
    "abn_blur": {"forward": (2, 1), "backward": (3, 2)},
    "abn_se": {"forward": (3, 1), "backward": (4, 1)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunSettings):
    """Operations and sizes to time."""

    rounds: RoundCount = 5
    ops: Positional[tuple[Literal["abn_join", "abn", "abn_blur", "abn_se"], ...]] = tuple(IDEAL)
    """Operations to time."""
    batch_size: Annotated[Size, Ge(2)] = 128
    """Images in a batch."""
    input_size: Size = 224
    """Side of the image in pixels, divisible by 32, which determines the sizes of the maps."""
    dtype: Dtype | None = None
    """Type of the feature maps; by default bf16 on a GPU and fp32 on a CPU."""
    inductor: bool = False
    """Also time torch.compile, which takes seconds to compile each operation and place."""


class Inputs(NamedTuple):
    """Input map, the norm with blur and SE, the shortcut of abn_join, and the output's gradient."""

    x: Tensor
    norm: Any
    shortcut: Tensor | None
    grad: Tensor


def make_inputs(site: Site, device: torch.device, options: Options) -> Inputs:
    """Return random inputs of an operation."""
    layout = {"dtype": torch_dtype(options.dtype or "fp32"), "memory_format": torch.channels_last}
    blurs, joins = site.op == "abn_blur", site.op == "abn_join"
    channels, side = site.channels, options.input_size // site.reduction
    draw = functools.partial(torch.randn, device=device)
    sides = side, side, side // 2 if blurs else side
    maps = [draw(options.batch_size, channels, side, side) for side in sides]
    x, shortcut, grad = (tensor.to(**layout) for tensor in maps)
    sizes = [(site.se, channels), (site.se,), (channels, site.se), (channels,)]
    gamma, beta, *gate = (draw(size).mul_(0.1) for size in [(channels,), (channels,), *sizes])
    for tensor in (x, shortcut, gamma.add_(1), beta, *gate):
        tensor.requires_grad_()
    se = epilogue.SEWeights(*gate) if site.se else None
    norm = epilogue.Epilogue(gamma, beta, slope=None if joins else 1e-3, blur=blurs, se=se)
    return Inputs(x, norm, shortcut if joins else None, grad)


def plain(
    x: Tensor,
    norm: epilogue.Epilogue,
    shortcut: Tensor | None,
    running: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    training: bool = True,
) -> Tensor:
    """Compute an operation with PyTorch's operators."""
    y = F.batch_norm(x, *running, norm.gamma, norm.beta, training, 0.1, norm.eps)
    y = y if norm.slope is None else F.leaky_relu(y, norm.slope, inplace=norm.slope >= 0)
    y = blur_pool(y) if norm.blur else y
    if norm.se is not None:
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = (p.to(x.dtype) for p in norm.se)
        hidden = torch.relu(F.linear(y.mean((2, 3)), fc1_weight, fc1_bias))
        y = y * torch.sigmoid(F.linear(hidden, fc2_weight, fc2_bias))[:, :, None, None]
    return y if shortcut is None else torch.relu(y + shortcut)


def by_autograd(function: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, Callable]:
    """Return the output of `function`, and a function that runs autograd's backward."""
    x, norm, shortcut, grad = inputs
    leaves = [x, norm.gamma, norm.beta, *(norm.se or ()), *([] if shortcut is None else [shortcut])]
    y = function(x, norm, shortcut)
    return y, lambda: torch.autograd.grad(y, leaves, grad)


@torch.no_grad()
def by_kernels(inputs: Inputs) -> tuple[Tensor, Callable]:
    """Return the output of the Triton kernels, and a function that runs their backward."""
    x, norm, shortcut, grad = inputs
    y, saved = epilogue.forward(x, norm, shortcut=shortcut, saves=True)

    @torch.no_grad()
    def backward() -> Sequence[Tensor]:
        sums = epilogue.gradient_sums(grad, None, norm, saved, rebuilds=False)
        masked = [] if sums.masked_grad is None else [sums.masked_grad]
        x_grad = epilogue.gradient(masked[0] if masked else grad, norm, saved, sums)
        return [x_grad, *(grad for grad in sums.grads if grad is not None), *masked]

    return y, backward


FORWARD = {
    "eager": functools.partial(by_autograd, plain),
    "inductor": functools.partial(by_autograd, torch.compile(plain, fullgraph=True)),
    "triton": by_kernels,
}


class _OpContender(runner.Contender):
    """Forward or backward of an operation by one implementation, or a copy of as many bytes."""

    ratio_column = "ratio_to_copy"

    def __init__(
        self, site: Site, device: torch.device, options: Options, direction: str, name: str
    ) -> None:
        self._make = functools.partial(make_inputs, site, device, options)
        self._device, self._clock = device, clock_for(device)
        self._forward, self.compared_with = FORWARD.get(name), direction
        self._reads, self._writes = IDEAL[site.op][direction]
        values = site.op, site.place, str(options.dtype), direction, name
        keys = "op", "place", "dtype", "direction", "contender"
        self.columns, self.label = dict(zip(keys, values, strict=True)), ", ".join(values)

    def set_up(self) -> None:
        torch.manual_seed(0)
        first, count = self._make(), 2
        x_bytes, y_bytes = first.x.nbytes, first.grad.nbytes
        if self._device.type == "cuda":
            cache_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
            count = min(MOST_BUFFERS, math.ceil(TIMES_CACHE * cache_bytes / (x_bytes + y_bytes)))
        self._buffers = [self._make() for _ in range(count)]
        self.units = self._reads * x_bytes + self._writes * y_bytes
        half = torch.zeros(self.units // 2, dtype=torch.uint8, device=self._device)
        self._sources = [half.clone() for _ in self._buffers]
        for call in self._calls():  # the first call compiles the kernels
            call()

    def _calls(self) -> Sequence[Callable]:
        """Return a call for each buffer; for backward calls, run the forward passes first."""
        if self._forward is None:
            return [source.clone for source in self._sources]
        if self.compared_with == "forward":
            return [functools.partial(self._forward, inputs) for inputs in self._buffers]
        return [self._forward(inputs)[1] for inputs in self._buffers]

    def visit(self) -> Sequence[float]:
        calls, on_gpu = self._calls(), self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda._sleep(WAIT_CYCLES)
        begin = self._clock.mark()
        outputs = [call() for call in calls]  # all stay alive, so each call writes other memory
        if on_gpu and self._clock.reached(begin):
            raise runner.NoResultError("host_bound", "the calls were not queued in time")
        end = self._clock.mark()
        self._clock.wait(end)
        return [self._clock.seconds(begin, end) / len(outputs)]

    def figures(self, rounds: runner.Rounds) -> dict[str, Any]:
        if not rounds:
            return dict.fromkeys(("ideal_bytes", "p50_us", "gb_per_s"))
        p50_s = statistics.median(itertools.chain(*rounds))
        gb_per_s = self.units / p50_s / 1e9
        return {"ideal_bytes": self.units, "p50_us": p50_s * 1e6, "gb_per_s": gb_per_s}

    def close(self) -> None:
        self._buffers, self._sources = [], []


def main(options: Options) -> int:
    """Time all operations at all places, print the table and write the record."""
    options.check()
    device = devices.timed_device(options.device)
    on_gpu = device.type == "cuda"
    options = dataclasses.replace(options, dtype=options.dtype or ("bf16" if on_gpu else "fp32"))
    # Only a GPU runs the Triton kernels; on a CPU, Triton's interpreter would be timed.
    names = ["copy", "eager", *["inductor"] * options.inductor, *["triton"] * on_gpu]
    pairs = list(itertools.product(("forward", "backward"), names))
    sites = [site for site in SITES if site.op in options.ops]
    groups = [[_OpContender(site, device, options, *pair) for pair in pairs] for site in sites]
    what = {"settings": options.to_dict(), "runs": options.rounds}
    record = RecordFile(options.output_dir, "bench_ops", device=device, **what)
    with runner.timing_on(device):
        many = {"rounds": options.rounds, "compiles": options.inductor}
        outcome = runner.run(groups, options, log=progress, record=record, **many)
    columns = [("p50 us", "p50_us", ".1f"), ("GB/s", "gb_per_s", ".1f")]
    return report(outcome, [*columns, ("x copy", "ratio_to_copy", ".3f")])


if __name__ == "__main__":
    sys.exit(shell.run(lambda: main(tyro.cli(Options, description=__doc__))))
