"""What a run saves to go on exactly where it stopped."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tresnet.engine.distributed import Processes
from tresnet.errors import CheckpointError, ConfigError
from tresnet.files import atomic_write
from tresnet.steps import TrainingStep

FORMAT = 1
LAST, BEST = "last.pt", "best.safetensors"


@dataclasses.dataclass
class Progress:
    """How far a run is.

    Attributes:
        epoch: The epoch under way, from 0.
        batch: Batches of it that are done, on each process.
        update: Updates of the weights so far.
        images: Images of this epoch so far, over all processes.
        loss_sum: Their losses.
        hits: Those of them that were classified correctly.
        elapsed_s: Seconds of training so far, evaluation and pauses included.
        best_score: Best validation accuracy, or mAP where images have several labels, in percent;
            -1 before the first evaluation.
        best_loss: Its validation loss, which decides between equal accuracies.
        best_epoch: The epoch that had it, counted from 1.
        last_score: The same of the last evaluation; -1 before the first.
    """

    epoch: int = 0
    batch: int = 0
    update: int = 0
    images: int = 0
    loss_sum: float = 0.0
    hits: int = 0
    elapsed_s: float = 0.0
    best_score: float = -1.0
    best_loss: float = math.inf
    best_epoch: int = 0
    last_score: float = -1.0

    def next_epoch(self) -> None:
        """Turn to the beginning of the next epoch."""
        self.epoch += 1
        self.batch = self.images = self.hits = 0
        self.loss_sum = 0.0


@dataclasses.dataclass(frozen=True)
class Identity:
    """What must be equal for a state to fit: it was saved by the same run on the same data.

    Attributes:
        world: Processes, whose random states are saved one by one.
        fingerprint: Of the training files.
        classes: Names in the order of the labels.
    """

    world: int
    fingerprint: str
    classes: list[str]


def save(
    path: Path, step: TrainingStep, progress: Progress, identity: Identity, processes: Processes
) -> None:
    """Write the state of all processes to one file (a collective; process 0 writes).

    Raises:
        CheckpointError: The file cannot be written; an earlier one is left as it was.
    """
    generators = processes.gather(random_state(processes.device))
    if not processes.is_main:
        return
    content = {
        **step.state_dict(),  # under the keys by which weights are found in timm's checkpoints
        "format": FORMAT,
        "identity": dataclasses.asdict(identity),
        "progress": dataclasses.asdict(progress),
        "generators": generators,
    }
    with writing(path), atomic_write(path) as temporary:
        torch.save(content, temporary)


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote, without running any code the file may hold.

    Raises:
        CheckpointError: No such file, or it is damaged or of another format.
    """
    if not path.is_file():
        raise CheckpointError(
            f"expected a checkpoint to resume from at {path}, found none: the run stopped before"
            " its first one, or this is not a run directory"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise nearly anything
        raise CheckpointError(
            f"cannot read {path}, which is damaged or was not written by this program"
            f" ({type(error).__name__}): start a new run, --weights RUN_DIR/{BEST} from its best"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"expected a training state of format {FORMAT} in {path}")
    missing = {"identity", "progress", "generators", "model", "optimizer"} - content.keys()
    if missing:
        raise CheckpointError(f"expected a whole training state in {path}, without {missing}")
    return content


def restore(
    content: dict[str, Any], step: TrainingStep, identity: Identity, processes: Processes
) -> Progress:
    """Put a loaded state into the step and this process's random generators.

    Raises:
        ConfigError: The state belongs to other data or another number of processes.
    """
    saved = Identity(**content["identity"])
    if saved.world != identity.world:
        raise ConfigError(
            f"the run was started with {saved.world} processes and is resumed with"
            f" {identity.world}: use the same number (torchrun --nproc-per-node)"
        )
    if saved.classes != identity.classes:
        raise ConfigError(
            f"the run was trained on {len(saved.classes)} classes ({_some(saved.classes)}), the"
            f" data now have {len(identity.classes)} ({_some(identity.classes)})"
        )
    if saved.fingerprint != identity.fingerprint:
        raise ConfigError(
            "the training images are not the ones the run began with (other files, or another"
            " order): resume with those, or start a new run"
        )
    step.load_state_dict(content)
    set_random_state(content["generators"][processes.rank], processes.device)
    return Progress(**content["progress"])


def random_state(device: torch.device) -> dict[str, Any]:
    """State of this process's generators, in types that load without running code."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    version, internal, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "python": [version, list(internal), following],
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put this process's generators back into a state that `random_state` gave."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy_state = state["numpy"]
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})  # noqa: NPY002
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed the global generators of Python, NumPy, PyTorch and this process's GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write `path` into an error that says the old file is still there.

    Raises:
        CheckpointError: Writing failed.
    """
    existed = path.exists()
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or _first_line(error)
        kept = "the one written before is intact" if existed else "there was none before"
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {reason}; {kept}. Free some space, then go on"
            " with --resume"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
