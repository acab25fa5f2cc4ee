"""Writes images and reads what runs on them wrote, and makes streams that take nothing."""

import itertools
import json
import os
import random
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tresnet.cli import shell
from tresnet.cli.train_eval import eval_command, train_command
from tresnet.engine.config import Resolved
from tresnet.engine.distributed import Processes
from tresnet.engine.resolve import agreed, fill

CPU = torch.device("cpu")
ALONE = Processes(0, 1, CPU)
CLASSES = ("blue", "green", "red")
VARYING = (
    *("images_per_s", "data_wait_pct", "elapsed_s", "set_up_s", "allocated_mib", "reserved_mib"),
    *("max_allocated_mib", "device_used_mib", "rss_peak_mib"),
)


def write_images(
    root: Path, classes: tuple[str, ...] = CLASSES, suffix: str = ".png", **counts: int
) -> None:
    """Write so many noisy 12 x 12 images for each split by name, in turn for each class."""
    for split, count in counts.items():
        noise = np.random.default_rng(count)
        for index in range(count):
            label = index % len(classes)
            pixels = noise.integers(0, 160, (12, 12, 3))
            pixels[..., 2 - label % 3] += 80
            folder = root / split / classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index:03d}{suffix}")


def resolved(config, weights=None):
    """Return the complete configuration of a new run on the CPU, whose batch size is a number."""
    return Resolved(**vars(fill(agreed(config, False, ALONE), weights)))


def rows_of(run_dir, phase="train"):
    """Return the rows of a phase, or of all, without the columns that vary from run to run."""
    rows = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name not in VARYING}
        for row in rows
        if phase in (row["phase"], None)
    ]


def tensors_of(run_dir):
    """Return the weights, the EMA, the momenta and the loss scale of the last state."""
    content = torch.load(run_dir / "last.pt", weights_only=True)
    momenta = {
        f"{name} {i}": tensor
        for i, state in content["optimizer"]["state"].items()
        for name, tensor in state.items()
    }
    ema = {f"ema {k}": v for k, v in (content["model_ema"] or {}).items()}
    scaler = {name: torch.tensor(value) for name, value in content["scaler"].items()}
    return content["model"] | ema | momenta | scaler


def assert_same_run(run_dir, other):
    """Check that both runs logged the same figures and ended with the same bits."""
    assert rows_of(run_dir, None) == rows_of(other, None)
    assert len((run_dir / "log.csv").read_text().splitlines()) == 1 + len(rows_of(other, None))
    expected = tensors_of(other)
    for name, tensor in tensors_of(run_dir).items():
        assert torch.equal(tensor, expected[name]), name


def at_calls(patch, place, name, numbers, before=None, after=None):
    """Do something before or after those calls of `place.name`, counted from 1."""
    original, count = getattr(place, name), itertools.count(1)

    def called(*args, **kwargs):
        is_time = next(count) in numbers
        if is_time and before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if is_time and after is not None:
            after(*args, **kwargs)
        return result

    patch.setattr(place, name, called)


def draw():
    """Draw from every global generator."""
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full_device():
    return Path("/dev/full").open("w")


def _main(command, arguments):
    """Run train.py or eval.py in this process; a text is split into arguments at its spaces."""
    words = arguments.split() if isinstance(arguments, str) else [*map(str, arguments)]
    return shell.run(lambda: command(words))


train_main, eval_main = partial(_main, train_command), partial(_main, eval_command)
