"""Predicts images/s of data-parallel training on many GPUs from the step of one.

`python benchmarks/scaling.py --step-ms 60 --batch-size 128`. Nothing is measured here: all values
are inputs, and their defaults are assumptions. The model of a step:

* Forward is a third of the step, the optimizer nothing; backward takes its time in proportion to
  the multiply-accumulates of each layer, last layer first.
* Gradients are 32-bit and travel in DistributedDataParallel's buckets (1 MiB, then 25), each as
  soon as its last gradient is there, one after another, while backward goes on.
* An all-reduce of B bytes on N GPUs takes 2 (N - 1) / N * B / bandwidth + 2 log2(N) * latency:
  NCCL's tree, whose slowest link is a GPU's fraction of the network of its node.
* Steps of one GPU vary normally; all wait for the slowest of N, which is sqrt(2 ln N) deviations
  late. Data arrive in time.
"""

import argparse
import math

import torch
from torch import nn

import tresnet

MIB = 2**20


def gradients(name: str, size: int) -> list[tuple[int, int]]:
    """Return (bytes, multiply-accumulates of an image) of each layer's gradients, last layer first.

    Layers with parameters other than convolutions and matrix products count as taking no time.
    """
    found: list[tuple[int, int]] = []

    def note(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        parameters = list(layer.parameters(recurse=False))
        weight = getattr(layer, "weight", None)
        pixels = output.shape[2:].numel() if output.dim() == 4 else 1
        multiplies = isinstance(layer, nn.Conv2d | nn.Linear) and weight is not None
        macs = weight.numel() * pixels if multiplies else 0
        found.append((sum(4 * p.numel() for p in parameters), macs))

    with torch.no_grad():
        model = tresnet.create(name, device="meta").eval()
        for layer in model.modules():
            if list(layer.parameters(recurse=False)):
                layer.register_forward_hook(note)
        model(torch.empty(1, 3, size, size, device="meta"))
    return found[::-1]


def exposed_ms(
    layers: list[tuple[int, int]],
    backward_ms: float,
    gpus: int,
    gb_per_s: float,
    latency_us: float,
    bucket_mib: float = 25,
) -> float:
    """Return the time from the end of backward to the arrival of the last bucket."""
    total = sum(macs for _, macs in layers)
    now_ms = sent_ms = 0.0
    held, limit = 0, MIB
    for number, (size, macs) in enumerate(layers):
        now_ms += backward_ms * macs / total
        held += size
        if held >= limit or number == len(layers) - 1:
            travel_s = 2 * (gpus - 1) / gpus * held / (gb_per_s * 1e9)
            travel_s += 2 * math.log2(gpus) * latency_us * 1e-6
            sent_ms = max(sent_ms, now_ms) + 1e3 * travel_s
            held, limit = 0, bucket_mib * MIB
    return max(sent_ms - backward_ms, 0.0)


def main() -> None:
    """Print a line for each number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--step-ms", type=float, required=True, help="of one GPU, from its log or bench train")
    add("--batch-size", type=int, required=True, help="images of one GPU")
    add("--model", default="tresnet_m")
    add("--input-size", type=int, default=224)
    add("--gb-per-s", type=float, default=20.0, help="a GPU's fraction of its node's network")
    add("--latency-us", type=float, default=15.0, help="of a hop between nodes")
    add("--jitter-pct", type=float, default=1.0, help="deviation of steps, of their mean")
    add("--gpus", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    asked = parser.parse_args()
    layers = gradients(asked.model, asked.input_size)
    print("GPUs  exposed ms  slowest ms  step ms  images/s  efficiency %")
    for gpus in asked.gpus:
        exposed = late = 0.0
        if gpus > 1:
            link = (gpus, asked.gb_per_s, asked.latency_us)
            exposed = exposed_ms(layers, asked.step_ms * 2 / 3, *link)
            late = asked.step_ms * asked.jitter_pct / 100 * math.sqrt(2 * math.log(gpus))
        step = asked.step_ms + exposed + late
        rate = gpus * asked.batch_size / step * 1e3
        print(
            f"{gpus:4}  {exposed:10.2f}  {late:10.2f}  {step:7.2f}  {rate:8.0f}"
            f"  {100 * asked.step_ms / step:12.1f}"
        )


if __name__ == "__main__":
    main()
