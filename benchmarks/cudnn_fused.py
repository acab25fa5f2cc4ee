#!/usr/bin/env python3
"""Time convolutions of the folded tresnet_m with cuDNN's fused epilogues, and write a record.

Only a bias, a leaky ReLU, or a shortcut and a ReLU follow these convolutions. `today` is a
convolution and our kernel; `torch` is PyTorch's operator with a shortcut and a ReLU; `graph` is a
graph of nvidia-cudnn-frontend. A call's time is that within a CUDA graph of many calls. Against
float64, the error of two images may be twice that of PyTorch's operators. A CPU runs `today` alone,
by Triton's interpreter (TRITON_INTERPRET=1) or by the kernels' definition.
"""

import dataclasses
import functools
import gc
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
import tyro

from tresnet import devices
from tresnet.cli import output, shell
from tresnet.measure import records, runner, settings, throughput
from tresnet.ops import epilogue, tiles
from tresnet.ops.epilogue import definition
from tresnet.settings import fields, torch_dtype

# Launches, filters' size, channels, filters, reduction of the image's side, and what follows: the
# slope of a leaky ReLU, "bias" or "shortcut". The stride is 1, and padding keeps the map's size.
SITES = [
    (11, 1, 256, 1024, 16, "shortcut"), (10, 1, 1024, 256, 16, 1e-3), (3, 3, 64, 64, 4, 1e-3),
    (3, 3, 128, 128, 8, 1e-3), (3, 1, 512, 2048, 32, "shortcut"), (2, 1, 2048, 512, 32, 1e-3),
    (2, 3, 512, 512, 32, 1e-3), (1, 3, 48, 64, 4, 1e-2), (1, 1, 128, 256, 8, 1e-3),
    (1, 1, 1024, 512, 16, 1e-3), (1, 1, 64, 128, 8, "bias"), (1, 1, 128, 1024, 16, "bias"),
    (1, 1, 1024, 2048, 32, "bias"),
]  # fmt: skip
KEYS = "launches", "size", "channels", "filters", "reduction", "after", "batch", "dtype", "way"
SETS, REPEATS = 8, 8  # sets of tensors, and calls with each of them in a CUDA graph
WAIT_CYCLES = 2**22  # about 2 ms, in which the graph is queued


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(settings.RunSettings):
    """Sizes and dtypes, the most important first, in case the time limit leaves some out."""

    rounds: settings.RoundCount = 3
    batch_sizes: tuple[fields.Size, ...] = (1, 64, 8)
    dtypes: tuple[Literal["bf16", "fp16"], ...] = ("bf16", "fp16")
    input_size: fields.Size = 224


def by_two(ops: Any, after: Any, x: Any, weight: Any, bias: Any, shortcut: Any = None) -> Any:
    """Run a convolution and what follows, as the folded model does."""
    y = torch.conv2d(x, weight, None, padding=weight.shape[-1] // 2)
    norm = epilogue.Epilogue(None, bias, slope=after if isinstance(after, float) else None)
    return ops.forward(y, norm, shortcut=shortcut)[0]


def by_torch(x: Any, weight: Any, bias: Any, shortcut: Any) -> Any:
    """Run PyTorch's operator: after bias come stride, padding, dilation and groups."""
    sizes = (1, 1), (weight.shape[-1] // 2,) * 2, (1, 1), 1
    return torch.cudnn_convolution_add_relu(x, weight, shortcut, 1.0, bias, *sizes)


@functools.cache
def cudnn_handle() -> Any:
    """Return the handle of all graphs."""
    return importlib.import_module("cudnn").create_handle()


def by_graph(after: Any, *like: Any) -> Any:
    """Compile a graph for tensors such as `like`; return a function that runs it."""
    cudnn: Any = importlib.import_module("cudnn")  # of the package nvidia-cudnn-frontend

    types, handle = cudnn.data_type, cudnn_handle()
    dtype = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[like[0].dtype]
    wide = {"intermediate_data_type": types.FLOAT, "compute_data_type": types.FLOAT}
    graph, inputs = cudnn.pygraph(io_data_type=dtype, handle=handle, **wide), []
    for tensor in like:
        n, c, h, w = tensor.shape if tensor.dim() == 4 else (1, len(tensor), 1, 1)
        stride = [c * h * w, 1, c * w, c]  # where a size is 1, PyTorch's strides vary
        inputs.append(graph.tensor(dim=[n, c, h, w], stride=stride, data_type=dtype))
    (x, weight, bias, *shortcut), padding = inputs, [like[1].shape[-1] // 2] * 2
    y = graph.conv_fprop(image=x, weight=weight, padding=padding, stride=[1, 1], dilation=[1, 1])
    y = graph.bias(input=y, bias=bias)
    y = graph.leaky_relu(input=y, negative_slope=after) if isinstance(after, float) else y
    y = graph.relu(input=graph.add(a=y, b=shortcut[0])) if shortcut else y
    y.set_output(True).set_data_type(dtype)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    (n, _, h, w), filters = like[0].shape, len(like[2])
    workspace = like[0].new_empty(graph.get_workspace_size() + 1, dtype=torch.uint8)

    def run(*tensors: Any) -> Any:
        out = like[0].new_empty(n, h, w, filters).permute(0, 3, 1, 2)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute({**dict(zip(inputs, tensors, strict=True)), y: out}, workspace, handle=handle)
        return out

    return run


class _Way(runner.Contender):
    ratio_column = "ratio_to_today"

    def __init__(self, values: Sequence[Any], side: int, device: torch.device) -> None:
        self.columns: dict[str, Any] = dict(zip(KEYS, values, strict=True)) | {"error_ratio": None}
        _, size, channels, filters, reduction, self._after, batch, self._dtype, self._way = values
        self.label = f"{size}x{size} {channels}>{filters}, {', '.join(map(str, values[5:]))}"
        x, out = ((batch, c, side // reduction, side // reduction) for c in (channels, filters))
        shapes = [x, (filters, channels, size, size), (filters,)]
        self._shapes = shapes + [out] * (self._after == "shortcut")
        self._device, self._clock = device, throughput.clock_for(device)

    def set_up(self) -> None:
        torch.manual_seed(0)
        on_gpu = self._device.type == "cuda"
        sets = [self._draw() for _ in range(SETS if on_gpu else 1)]
        ops = epilogue if on_gpu or tiles.interpreted() else definition
        call: Any = functools.partial(by_two, ops, self._after)
        if self._way != "today":
            call = by_torch if self._way == "torch" else by_graph(self._after, *sets[0])
        self.columns["error_ratio"] = self._error_ratio(call(*sets[0]), *sets[0])
        calls = sets * REPEATS if on_gpu else sets
        self._calls = len(calls)
        self._run: Any = lambda: [call(*tensors) for tensors in calls]
        if on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run()
            self._alive = sets, call  # the graph uses the memory of tensors and workspaces
            self._run = graph.replay
            self._run()

    def _draw(self) -> list[Any]:
        like = {"device": self._device, "dtype": torch_dtype(self._dtype)}
        x, weight, bias, *shortcut = (torch.randn(shape, **like) for shape in self._shapes)
        maps = [x, weight.div_(weight[0].numel() ** 0.5), *shortcut]
        x, weight, *shortcut = (t.contiguous(memory_format=torch.channels_last) for t in maps)
        return [x, weight, bias, *shortcut]

    def _error_ratio(self, out: Any, x: Any, weight: Any, bias: Any, *shortcut: Any) -> float:
        ends = [0, -1]  # the first and the last image
        inputs = [x[ends], weight, bias, *(tensor[ends] for tensor in shortcut)]
        with torch.backends.cudnn.flags(enabled=False):
            plain, exact = (
                by_two(definition, self._after, *tensors)
                for tensors in (inputs, [tensor.double() for tensor in inputs])
            )
        ratio = float((out[ends] - exact).norm() / (plain - exact).norm())
        if not ratio <= 2:  # NaN fails too; Triton's interpreter truncates bf16, for 1.7
            raise ArithmeticError(f"the error is {ratio:.3g} times that of PyTorch's operators")
        return ratio

    def visit(self) -> Sequence[float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(WAIT_CYCLES)  # the graph is queued before it begins
        begin = self._clock.mark()
        self._run()
        end = self._clock.mark()
        self._clock.wait(end)
        return [self._clock.seconds(begin, end) / self._calls]

    def figures(self, rounds: runner.Rounds) -> dict[str, Any]:
        times = list(itertools.chain(*rounds))
        return {"p50_us": statistics.median(times) * 1e6 if times else None}

    def close(self) -> None:
        self._run = self._alive = None


def main(options: Options) -> int:
    """Time each convolution in each way, print the table and write the record."""
    options.check()
    device = devices.timed_device(options.device)
    on_gpu, has_graphs = device.type == "cuda", importlib.util.find_spec("cudnn") is not None
    if on_gpu and not has_graphs:
        output.progress("without graphs: the package nvidia-cudnn-frontend is not installed")
    groups = [
        [
            _Way((*site, batch, dtype, way), options.input_size, device)
            for way in ["today", *["torch"] * on_gpu, *["graph"] * (on_gpu and has_graphs)]
            if way != "torch" or site[-1] == "shortcut"
        ]
        for dtype, batch, site in itertools.product(options.dtypes, options.batch_sizes, SITES)
    ]
    what = {"settings": options.to_dict(), "runs": options.rounds}
    record = records.RecordFile(options.output_dir, "bench_cudnn_fused", device=device, **what)
    with runner.timing_on(device), torch.no_grad():
        many = {"rounds": options.rounds, "log": output.progress, "record": record}
        outcome = runner.run(groups, options, **many)
    columns = [("launches", "launches", ""), ("p50 us", "p50_us", ".1f")]
    return output.report(outcome, [*columns, ("x today", "ratio_to_today", ".2f")])


if __name__ == "__main__":
    gc.freeze()  # the runner collects garbage hundreds of times: only what is new
    sys.exit(shell.run(lambda: main(tyro.cli(Options, description=__doc__))))
