"""Predicted GPU memory beside a published notebook's readings and other tools: prints its table.

    python benchmarks/memory_study.py            # without a GPU
    python benchmarks/memory_study.py --measure  # runs the notebook's cells on this machine's GPU

The notebook, 'GPU memory usage for deep learning image processing' (2023, torch 2.0.1), trains five
models in fp32 with SGD, one cell after another, and compares the readings with a formula. It keeps
every earlier model with its gradients on the GPU, so only its first reading is of one model alone:
`alone` is the reading less those leftovers. UNETR needs monai and einops, and the table torchinfo:

    pip install -e '.[unetr,compare]'
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tresnet.checkpoints.named import build_named, build_without_data
from tresnet.errors import MissingDependencyError, needed
from tresnet.memory.allocator import CachingAllocator, MemoryBlock
from tresnet.memory.device import GENERIC, MIB
from tresnet.memory.machine import FakeMachine, fake_copy
from tresnet.memory.trace import Category, Phase

N_CLASSES = 10
# Each cell trains for more, but the second step reaches the peak of all later ones.
STEPS = 2


@dataclass(frozen=True)
class Subject:
    """A model of the notebook, its batch, and what the notebook printed, in MiB."""

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    peak_mib: float
    end_mib: float
    reserved_mib: float
    alone_mib: float
    formula_mib: float


class SmallCnn(nn.Module):
    """3x3 conv to 8 channels, 2x2 average pool, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.pool = nn.AvgPool2d(2, 2)
        self.fc = nn.Linear(8 * 111 * 111, N_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of images (N, 3, 224, 224)."""
        return self.fc(self.pool(self.conv(x)).flatten(1))


def _torchvision(name: str) -> Callable[[], nn.Module]:
    return lambda: build_named(f"torchvision:{name}", num_classes=N_CLASSES)


def _unetr() -> nn.Module:
    from monai.networks.nets.unetr import UNETR

    return UNETR(
        in_channels=1,
        out_channels=2,
        img_size=(64, 64, 64),
        feature_size=16,
        hidden_size=768,
        mlp_dim=3072,
        num_heads=12,
        proj_type="perceptron",
        norm_name="instance",
        res_block=True,
        dropout_rate=0.0,
    )


_IMAGES = (128, 3, 224, 224), (128, N_CLASSES)
_VOLUMES = (8, 1, 64, 64, 64), (8, 2, 64, 64, 64)
SUBJECTS = {
    s.name: s
    for s in (
        Subject("cnn", SmallCnn, *_IMAGES, 530.9, 97.8, 604, 530.9, 635.8),
        Subject("vgg16", _torchvision("vgg16_bn"), *_IMAGES, 17231.9, 1125.1, 18752, 17224, 15929),
        Subject(
            "resnet50", _torchvision("resnet50"), *_IMAGES, 11738.2, 1307.0, 12982, 10703, 11378
        ),
        Subject(
            "vit_b_16", _torchvision("vit_b_16"), *_IMAGES, 17218.1, 1967.2, 18142, 15999, 18678
        ),
        Subject("unetr", _unetr, *_VOLUMES, 5177.9, 2645.8, 9268, 3301, 5605),
    )
}


def cell(subject: Subject, model: nn.Module, device: torch.device, machine: FakeMachine) -> tuple:
    """Run a cell of the notebook; return its variables, which live on after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    output = loss = x = y = None
    for _ in range(STEPS):
        machine.start_step()
        x = y = None
        with machine.during(Phase.INPUT):
            x = torch.empty(subject.input_shape, device=device)
            y = torch.empty(subject.target_shape, device=device)
        optimizer.zero_grad()
        with machine.during(Phase.FORWARD):
            output = model(x)
            loss = F.cross_entropy(output, y)
        with machine.during(Phase.BACKWARD):
            loss.backward()
        with machine.during(Phase.OPTIMIZER):
            optimizer.step()
    return x, y, output, loss


# -- predicted --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """Predicted output of one cell. `peak_high_mib` has workspaces at their highest."""

    name: str
    leftover_mib: float
    peak_mib: float
    peak_high_mib: float
    end_mib: float
    reserved_mib: float


def replay_notebook(subjects: Iterable[Subject]) -> list[Cell]:
    """Return the cells of these subjects, run one after another on one fake GPU."""
    machine = FakeMachine(GENERIC)
    names, ends, kept = [], [], []
    for subject in subjects:
        copied = fake_copy(build_without_data(subject.build), machine.mode)
        with machine.running():
            with machine.during(Phase.SETUP, Category.PARAMETERS):
                copied.to(machine.device)
            machine.adopt(copied)
            variables = cell(subject, copied, machine.device, machine)
            ends.append(len(machine.recorder.trace.events))
            del variables  # the next cell overwrites them
        kept.append(copied)
        names.append(subject.name)
    trace = machine.recorder.trace.settled()
    allocator = CachingAllocator()
    blocks: dict[int, MemoryBlock | None] = {}
    cells, begin = [], 0
    for name, end in zip(names, ends, strict=True):
        allocator.empty_cache()
        leftover = peak = allocator.allocated_bytes
        high, reserved = 0, allocator.reserved_bytes
        for event in trace.events[begin:end]:
            if event.alive:
                blocks[event.buffer] = allocator.malloc(trace.buffers[event.buffer].n_bytes)
                borrowed = trace.operations[event.op].workspace_high_bytes
                peak = max(peak, allocator.allocated_bytes)
                high = max(high, allocator.allocated_bytes + borrowed)
                reserved = max(reserved, allocator.reserved_bytes)
            else:
                allocator.free(blocks.pop(event.buffer))
        sizes = (leftover, peak, high, allocator.allocated_bytes, reserved)
        cells.append(Cell(name, *(n / MIB for n in sizes)))
        begin = end
    return cells


# -- what others say --------------------------------------------------------------------------

# Layers that the notebook counts as in-place; it counts nn.MultiheadAttention's output five times.
_MEMORYLESS = (nn.ReLU, nn.GELU, nn.LeakyReLU, nn.Dropout, nn.Softmax, nn.LayerNorm,
               nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # fmt: skip


def formula_mib(subject: Subject) -> float:
    """Return the notebook's formula for SGD in fp32: 2 (D + O) + 2 W (Gao et al., FSE 2020)."""
    outputs: list[int] = []
    weights: list[int] = []
    last: list[torch.Size] = []

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        times = 5 if isinstance(module, nn.MultiheadAttention) else 1
        last[:] = [first.shape]
        weights.append(sum(p.numel() for p in module.parameters() if p.requires_grad))
        outputs.append(0 if isinstance(module, _MEMORYLESS) else times * first.numel())

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        model = fake_copy(build_without_data(subject.build), mode).eval()
        for module in model.modules():
            if not list(module.children()) or isinstance(module, nn.MultiheadAttention):
                module.register_forward_hook(hook)
        model(torch.empty(subject.input_shape))
    out = sum(outputs) + prod(last[0][1:])  # the model's own output comes on top
    return 4 * (2 * (prod(subject.input_shape) + out) + 2 * sum(weights)) / MIB


def torchinfo_mib(subject: Subject) -> float:
    """Return torchinfo's estimate: input, parameters, and all layer outputs twice."""
    from torchinfo import summary

    x = torch.empty(subject.input_shape, device="meta")
    with torch.device("meta"):
        model = build_without_data(subject.build).to("meta")
    info = summary(model, input_data=x, verbose=0, device="meta", mode="eval")
    return (info.total_input + info.total_output_bytes + info.total_param_bytes) / MIB


def mem_tracker_mib(subject: Subject) -> float:
    """Return the peak of PyTorch's MemTracker over two steps on fake CPU tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = fake_copy(build_without_data(subject.build), mode)
        x, y = torch.empty(subject.input_shape), torch.empty(subject.target_shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        tracker = MemTracker()
        tracker.track_external(model, x, y, optimizer)
        with tracker:
            for step in range(STEPS):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:  # its modules' statistics must start anew each step
                    tracker.reset_mod_stats()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]) / MIB


# -- measured ---------------------------------------------------------------------------------


def measure_notebook(subjects: Iterable[Subject]) -> Iterator[tuple[str, float, float, float]]:
    """Yield peak, end and reserved MiB of each cell on this machine's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    nobody = FakeMachine(GENERIC)  # not running, so it records nothing
    kept = []
    for subject in subjects:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        kept.append(subject.build().to(device))
        variables = cell(subject, kept[-1], device, nobody)
        readings = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.memory_allocated(),
            torch.cuda.max_memory_reserved(),
        )
        del variables
        yield subject.name, *(n / MIB for n in readings)


def main(argv: list[str]) -> int:
    """Print the table, or one line that says what to install."""
    warnings.simplefilter("ignore")
    try:
        with needed("UNETR, a model of the study,", "unetr"):
            import einops  # noqa: F401
            import monai  # noqa: F401
        with needed("the study", "compare"):
            import torchinfo  # noqa: F401
    except MissingDependencyError as error:
        sys.exit(str(error))
    if "--measure" in argv:
        for name, peak, end, reserved in measure_notebook(SUBJECTS.values()):
            print(f"{name:10} peak {peak:9.1f}  end {end:9.1f}  reserved {reserved:9.1f} MiB")
        return 0
    cells = {c.name: c for c in replay_notebook(SUBJECTS.values())}
    rows: list[tuple[str, Callable[[Subject], float], Callable[[Subject], float] | None]] = [
        ("notebook: measured peak", lambda s: s.peak_mib, None),
        ("predicted, cells in sequence", lambda s: cells[s.name].peak_mib, lambda s: s.peak_mib),
        ("notebook: at the cell's end", lambda s: s.end_mib, None),
        ("predicted, the same", lambda s: cells[s.name].end_mib, lambda s: s.end_mib),
        ("notebook: reserved", lambda s: s.reserved_mib, None),
        ("predicted, the same", lambda s: cells[s.name].reserved_mib, lambda s: s.reserved_mib),
        ("measured less leftovers: alone", lambda s: s.alone_mib, None),
        ("predicted, alone", lambda s: replay_notebook([s])[0].peak_mib, lambda s: s.alone_mib),
        ("the notebook's formula", formula_mib, lambda s: s.alone_mib),
        ("torchinfo", torchinfo_mib, lambda s: s.alone_mib),
        ("torch's MemTracker", mem_tracker_mib, lambda s: s.alone_mib),
    ]
    print("| MiB | " + " | ".join(SUBJECTS) + " |")
    print("|---|" + "---|" * len(SUBJECTS))
    for title, value, truth in rows:
        texts = []
        for subject in SUBJECTS.values():
            n = value(subject)
            error = "" if truth is None else f" ({100 * (n / truth(subject) - 1):+.1f} %)"
            texts.append(f"{n:.1f}{error}")
        print(f"| {title} | " + " | ".join(texts) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
