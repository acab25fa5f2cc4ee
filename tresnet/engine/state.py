"""What a run saves to go on exactly where it stopped.

A row of the log belongs to the state that holds it: a run that goes on writes its log anew from
there, so that no row is lost or doubled, whatever became of the log.
"""

import dataclasses
import math
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tresnet.checkpoints.metadata import check_metadata
from tresnet.checkpoints.save import checkpoint_metadata
from tresnet.engine import fields
from tresnet.engine.config import TrainConfig
from tresnet.engine.distributed import Processes
from tresnet.errors import CheckpointError, ConfigError, InputError
from tresnet.files import atomic_write, explained
from tresnet.steps import TrainingStep

FORMAT = 3
LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.safetensors"
DAMAGED = "damaged.pt"


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
        bad_steps: Updates skipped so far because their loss or gradient was not finite.
        skipped: Unreadable training images so far, of all processes.
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
    bad_steps: int = 0
    skipped: tuple[str, ...] = ()

    def next_epoch(self) -> None:
        """Turn to the beginning of the next epoch."""
        self.epoch += 1
        self.batch = self.images = self.hits = 0
        self.loss_sum = 0.0


@dataclasses.dataclass(frozen=True)
class Identity:
    """What must be equal for a state to fit: it was saved by the same run on the same data.

    Attributes:
        world: Processes that the run began with.
        train: Fingerprint of the training images.
        val: Fingerprint of the others.
        beside: Fingerprint of the files of the hierarchy and the teacher.
        classes: Names in the order of the labels.
    """

    world: int
    train: str
    val: str
    beside: str
    classes: tuple[str, ...]


@dataclasses.dataclass
class Record:
    """What belongs to a state beside weights and optimizer.

    Attributes:
        config: The run's resolved configuration.
        identity: What it trains on.
        progress: How far it is.
        rows: All rows of its log so far, of process 0.
    """

    config: TrainConfig
    identity: Identity
    progress: Progress = dataclasses.field(default_factory=Progress)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def save(directory: Path, step: TrainingStep, record: Record, processes: Processes) -> None:
    """Write the state of all processes to `last.pt` (a collective; process 0 writes).

    What was `last.pt` becomes `previous.pt`.

    Raises:
        WriteError: It cannot be written; `last.pt` is left as it was.
    """
    generators = processes.gather(random_state(processes.device))
    if not processes.is_main:
        return
    content = {
        **step.state_dict(),
        "format": FORMAT,
        "config": record.config.to_dict(),
        "identity": dataclasses.asdict(record.identity),
        "progress": dataclasses.asdict(record.progress),
        "rows": record.rows,
        "metadata": checkpoint_metadata(step.model),
        "generators": generators,
    }
    path, previous = directory / LAST, directory / PREVIOUS
    with atomic_write(path) as temporary:
        _write(content, temporary)
        if path.exists():
            with explained(previous):
                previous.unlink(missing_ok=True)
                try:
                    os.link(path, previous)  # so that there is a last.pt at any moment
                except OSError:  # a file system without links
                    os.replace(path, previous)


def add_row(directory: Path, row: dict[str, Any]) -> None:
    """Append a row to the last state, which stays the same otherwise.

    Raises:
        CheckpointError: It cannot be read.
        WriteError: It cannot be written.
    """
    _, content = read(directory / LAST)
    with atomic_write(directory / LAST) as temporary:
        _write({**content, "rows": [*content["rows"], row]}, temporary)


def find(directory: Path, say: Callable[[str], object]) -> Path | None:
    """The newest state of a run that can be read: None if there is none at all.

    A damaged `last.pt` is put aside, so that it does not become `previous.pt`.

    Raises:
        CheckpointError: There are states, but none that can be read.
    """
    last, previous = directory / LAST, directory / PREVIOUS
    errors = []
    for path in (last, previous):
        if not os.path.lexists(path):
            continue
        try:
            read(path)
        except CheckpointError as error:
            errors.append(str(error))
            continue
        if path == previous and errors:
            os.replace(last, directory / DAMAGED)
            say(f"{errors[0]}. It is kept as {DAMAGED}; going on from {path}, the one before")
        return path
    if errors:
        raise CheckpointError(
            "; ".join(errors) + f": start a new run, --weights {directory / BEST} from its best"
        )
    return None


def read(path: Path) -> tuple[Record, dict[str, Any]]:
    """Read what `save` wrote, without running any code the file may hold.

    Returns:
        The record, and all that the file holds.

    Raises:
        CheckpointError: No such file, or it is damaged or of another format.
    """
    if not path.is_file():
        raise CheckpointError(f"expected a training state in {path}, found no file")
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()  # torch does not look at the checksums that it writes
        if bad is not None:
            raise zipfile.BadZipFile(f"the checksum of {bad} is another")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise nearly anything
        raise CheckpointError(
            f"cannot read {path}, which is damaged or was not written by this program"
            f" ({type(error).__name__})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"expected a training state of format {FORMAT} in {path}")
    parts = {"config": TrainConfig, "identity": Identity, "progress": Progress}
    missing = {*parts, "rows", "metadata", "generators", "model", "optimizer"} - content.keys()
    if missing:
        raise CheckpointError(f"expected a whole training state in {path}, without {missing}")
    try:
        built = {
            name: fields.build(cls, content[name], str(path), name) for name, cls in parts.items()
        }
        check_metadata(content["metadata"])
    except (AttributeError, ConfigError, InputError, TypeError) as error:
        raise CheckpointError(f"expected a training state: {error}") from error
    if not _is_table(content["rows"]):
        raise CheckpointError(f"expected rows of a log in {path}, got something else")
    if not (isinstance(content["generators"], list) and content["generators"]):
        raise CheckpointError(f"expected the generators of each process in {path}, got none")
    return Record(**built, rows=list(content["rows"])), content


def check(saved: Identity, now: Identity) -> None:
    """Refuse to go on with other data.

    Raises:
        ConfigError: They differ.
    """
    if saved.classes != now.classes:
        raise ConfigError(
            f"the run was trained on {len(saved.classes)} classes ({_some(saved.classes)}), the"
            f" data now have {len(now.classes)} ({_some(now.classes)})"
        )
    for what, before, after in (
        ("training", saved.train, now.train),
        ("validation", saved.val, now.val),
    ):
        if before != after:
            raise ConfigError(
                f"the {what} images are not the ones the run began with (other files, sizes, order"
                " or labels): resume with those, or start a new run"
            )
    if saved.beside != now.beside:
        raise ConfigError(
            "--hierarchy, --teacher: the file is not the one the run began with: resume with that,"
            " or start a new run"
        )


def restore(content: dict[str, Any], step: TrainingStep, processes: Processes) -> None:
    """Put a state into the training step and this process's random generators.

    A process more than there were keeps the generators it has.

    Raises:
        CheckpointError: It does not fit.
    """
    try:
        step.load_state_dict(content)
        if processes.is_main or processes.rank < len(content["generators"]):
            set_random_state(content["generators"][processes.rank], processes.device)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the training state does not fit the model or its optimizer ({type(error).__name__}:"
            f" {error}): start a new run"
        ) from error


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


def _is_table(rows: object) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, dict)
        and all(value is None or isinstance(value, str | int | float) for value in row.values())
        for row in rows
    )


def _write(content: dict[str, Any], path: Path) -> None:
    with path.open("wb") as stream:  # of a path torch hides why it cannot be written
        torch.save(content, stream)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
