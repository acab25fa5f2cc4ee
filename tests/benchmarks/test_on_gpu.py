"""What a GPU shows first: the sanitizer's findings, times, and a run with its data.

`benchmarks/gpu.py` begins with these tests and those of the rooms. The cases on a CPU, which are
small, show that the same lines run.
"""

import os
import shutil
import statistics
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.profiler import profile

from benchmarks import gpu, make_jpegs
from benchmarks.profile_step import our_kernels
from tests.ops.test_render import batch
from tests.steps.stand_in import create_step
from tresnet.checkpoints.creation import create
from tresnet.cli.main import main
from tresnet.data.crops import Crops, RenderSpec
from tresnet.measure.runner import cudnn_benchmark
from tresnet.measure.throughput import clock_for
from tresnet.settings import Compute

KERNEL_TESTS = "se_of or even or odd or test_pool"
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing_in_se_and_pool(tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("no compute-sanitizer on PATH")
    files = [f"tests/ops/test_{name}.py" for name in ("epilogue", "pool")]
    sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7"]
    pytest_words = ["-m", "pytest", "-qx", "-pno:xdist", "-pno:cacheprovider", "-k", KERNEL_TESTS]
    # Without PyTorch's cache, the sanitizer sees the bounds of each tensor.
    done = subprocess.run(
        [*sanitizer, sys.executable, *pytest_words, *files],
        cwd=gpu.ROOT,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        timeout=95,
        check=False,
    )
    assert done.returncode == 0


def milliseconds(device, function, rounds):
    """Return the median time of a call on the device."""
    clock, times = clock_for(device), []
    for _ in range(rounds):
        begin = clock.mark()
        function()
        end = clock.mark()
        clock.wait(end)
        times.append(clock.seconds(begin, end) * 1000)
    return statistics.median(times)


@pytest.mark.parametrize("device", DEVICES)
def test_times_of_a_replay_and_of_rendering_alone_and_beside_it(device):
    """Print them, and the times of our kernels in a step. Those of a CPU mean nothing."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    name, count, side, rounds = ("tresnet_m", 256, 224, 20) if on_gpu else ("tresnet_t", 2, 32, 1)
    pixels, rows, _ = batch("cpu")
    pixels.random_(256)
    rows, spec = rows[:count], RenderSpec((224, 224), bicubic=False)
    crops = Crops(pixels.pin_memory() if on_gpu else pixels, rows, spec, pixels.numel())
    other = torch.cuda.Stream() if on_gpu else None
    step = create_step(create(name), Compute(amp="bf16" if on_gpu else "off"), device)
    images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8)
    images, labels = step.feed(images, torch.randint(1000, (count,)))
    rendered = crops.render(device)

    def train():
        step.backward(images, labels, cross_entropy)
        step.optimizer_step(1)

    def beside():
        with torch.cuda.stream(other):
            nonlocal rendered
            rendered = crops.render(device)
        train()
        if other is not None:
            torch.cuda.current_stream().wait_stream(other)

    expected = rendered.clone()
    with cudnn_benchmark():
        for _ in range(5):
            train()
        assert step.replayed == on_gpu
        for text, function in (
            ("a step", train), ("rendering", lambda: crops.render(device)), ("both", beside),
        ):  # fmt: skip
            sys.stdout.write(f"{text}: {milliseconds(device, function, rounds):.2f} ms\n")
        assert torch.equal(rendered, expected)
        with profile() as profiler:
            train()
    for row in profiler.key_averages():
        if row.key in our_kernels():
            sys.stdout.write(f"{row.key}: {row.count} x {row.device_time:.1f} us\n")


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_on_jpeg_files_is_evaluated_and_predicts(device, tmp_path, capfd):
    if device == "cuda":
        made, model, workers = (400, {"train": 2000, "val": 256}, 10), "tresnet_m", 15
        sizes = {"--batch-size": 64, "--input-size": 224}
    else:
        made, model, workers = (4, {"train": 16, "val": 8}, 2), "tresnet_t", 0
        sizes = {"--batch-size": 2, "--input-size": 32}
    make_jpegs.make(tmp_path / "images", *made)
    weights = tmp_path / "runs" / "jpeg" / "best.safetensors"
    data = {"--data": tmp_path / "images", "--workers": workers, "--device": device}
    run = {"--runs": tmp_path / "runs", "--name": "jpeg", "--recipe": "paper", "--epochs": 2}
    trained = {**run, "--model": model, **sizes, "--ema-decay": 0, **data}
    commands = {
        "train": trained,
        "eval": {"--weights": weights, **data},
        "predict": {tmp_path / "images" / "val": "--weights", weights: "--device", device: ""},
    }
    for command, options in commands.items():
        words = [str(word) for pair in options.items() for word in pair if word != ""]
        assert main([command, *words]) == 0
    out = capfd.readouterr().out
    sys.stdout.write(out)
    assert len(out.splitlines()) > made[1]["val"]
