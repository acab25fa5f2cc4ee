"""Write and read training states: `last.pt` and the older `previous.pt`, to resume a run exactly.

A training state, which process 0 writes, holds weights, optimizer, EMA, random generators of all
processes, progress and configuration.
"""

import dataclasses
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from tresnet.checkpoints.metadata import check_metadata
from tresnet.checkpoints.save import checkpoint_metadata
from tresnet.data.seeding import seed_cpu_generators
from tresnet.engine import config as configs
from tresnet.engine.config import Resolved, TrainConfig
from tresnet.engine.distributed import Processes
from tresnet.errors import CheckpointError, ConfigError, InputError, listed
from tresnet.settings import fields
from tresnet.steps import TrainingStep
from tresnet.writing import atomic_write

FORMAT = 5
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.safetensors"


@dataclasses.dataclass
class Progress:
    """Progress of a run; `images`, `loss_sum`, `hits` and `skipped` cover all processes."""

    __pydantic_config__: ClassVar = fields.REVALIDATED

    epoch: int = 0  # number of complete epochs
    micro_batches: int = 0  # micro-batches of the current epoch so far, on each process
    global_step: int = 0  # optimizer steps of the run so far, including skipped steps
    images: int = 0  # images of the current epoch so far
    loss_sum: float = 0.0  # sum of the losses of `images`
    hits: int = 0  # number of `images` that are classified correctly
    elapsed_s: float = 0.0  # includes evaluations, excludes the time between stop and resume
    best_score: float = -1.0  # accuracy or mAP in percent; -1 before the first evaluation
    best_loss: float = math.inf  # validation loss of the best epoch, to compare equal scores
    best_epoch: int = 0  # counts from 1
    last_score: float = -1.0  # score of the last evaluation, in the unit of `best_score`
    bad_steps: int = 0  # optimizer steps skipped for a non-finite loss or gradient
    skipped: tuple[str, ...] = ()  # unreadable training images

    def next_epoch(self) -> None:
        self.epoch += 1
        self.micro_batches = self.images = self.hits = 0
        self.loss_sum = 0.0


@dataclasses.dataclass(frozen=True)
class Identity:
    """Data and world size of a run at its start. `check` compares all fields but `world_size`."""

    __pydantic_config__: ClassVar = fields.REVALIDATED

    world_size: int  # number of processes when the run began
    train: str  # fingerprint of the training images
    val: str  # fingerprint of the validation images
    beside: str  # fingerprint of the files that --hierarchy, --class-weights and --teacher name
    classes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Saved:
    """Training state that was read from the file `path`, to continue a run."""

    path: Path
    config: TrainConfig
    identity: Identity
    progress: Progress
    state: dict[str, Any]  # tensors of the training step, random generators, metadata of the model


def save(
    directory: Path,
    step: TrainingStep,
    config: Resolved,
    identity: Identity,
    progress: Progress,
    processes: Processes,
) -> None:
    """Write the training state of all processes to `last.pt` (a collective).

    The old `last.pt` becomes `previous.pt`. After a WriteError, one of the files has the old state.
    """
    generators = processes.gather(random_state(processes.device))
    if not processes.is_main:
        return
    content = {
        **step.state_dict(),
        "format": FORMAT,
        "config": configs.to_json(config),
        "identity": dataclasses.asdict(identity),
        "progress": dataclasses.asdict(progress),
        "metadata": checkpoint_metadata(step.model),
        "generators": generators,
    }
    with (
        atomic_write(directory / LAST, former=directory / PREVIOUS) as temporary,
        temporary.open("wb") as stream,  # with a path, torch.save hides the system's error
    ):
        torch.save(content, stream)


def load(directory: Path, say: Callable[[str], object]) -> Saved | None:
    """Read `last.pt`, or `previous.pt` if `last.pt` is damaged or missing; `say` gets the reason.

    Returns None if neither file exists. Raises CheckpointError if neither can be read.
    """
    last, previous = directory / LAST, directory / PREVIOUS
    if not (last.exists() or previous.exists()):
        return None
    try:
        return read(last)
    except CheckpointError as error:
        problem = error
    try:
        saved = read(previous)
    except CheckpointError as error:
        raise CheckpointError(
            f"{problem}; {error}: start a new run with --weights {directory / BEST}"
        ) from error
    say(f"{problem}: continuing from {previous}, the one before")
    return saved


def read(path: Path) -> Saved:
    """Read a state without running pickled code, or raise CheckpointError or ConfigError."""
    if not path.exists():
        raise CheckpointError(f"there is no {path}, as after a kill while it was replaced")
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()  # torch writes checksums but does not check them
        if bad is not None:
            raise zipfile.BadZipFile(f"the checksum of {bad} is wrong")
        # Load to the CPU, because this machine may lack the GPU from which tensors were saved.
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise CheckpointError(f"expected a training state of format {FORMAT} in {path}")
        config = configs.from_json(content["config"], str(path))
        identity = fields.check(Identity(**content["identity"]), InputError)
        progress = fields.check(Progress(**content["progress"]), InputError)
        check_metadata(content["metadata"])
        if not isinstance(content["generators"], list):
            raise TypeError("expected a list, with an entry for each process")
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # damaged pickles raise many types of error
        raise CheckpointError(
            f"cannot read {path}, which is damaged or was not written by this program"
            f" ({type(error).__name__})"
        ) from error
    return Saved(path, config, identity, progress, content)


def check(saved: Identity, now: Identity) -> None:
    """Raise ConfigError if the data or a file of an option changed since the run began."""
    if saved.classes != now.classes:
        raise ConfigError(
            f"the run was trained on {len(saved.classes)} classes ({listed(saved.classes, 5)}), the"
            f" data now have {len(now.classes)} ({listed(now.classes, 5)})"
        )
    for name, what in (
        ("train", "the training images (their files, sizes, order or labels)"),
        ("val", "the validation images (their files, sizes, order or labels)"),
        ("beside", "the file of --hierarchy, --class-weights or --teacher"),
    ):
        if getattr(saved, name) != getattr(now, name):
            raise ConfigError(
                f"{what} changed since the run began: restore the former files, or start a new run"
            )


def restore(content: dict[str, Any], step: TrainingStep, processes: Processes) -> None:
    """Load the step's state and this process's random generators, or raise CheckpointError."""
    try:
        step.load_state_dict(content)
        # Processes that the saved run did not have keep the generators that `prepare` seeded.
        if processes.is_main or processes.rank < len(content["generators"]):
            set_random_state(content["generators"][processes.rank], processes.device)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the training state does not fit the model or its optimizer ({type(error).__name__}:"
            f" {error}): start a new run"
        ) from error


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of PyTorch's random generators; samples and mixing seed the others."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore this process's random generators from a result of `random_state`."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the global random generators of Python, NumPy, PyTorch and this process's GPU."""
    seed_cpu_generators(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
