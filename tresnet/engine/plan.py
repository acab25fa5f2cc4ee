"""First phase of a run: complete its configuration from the options, the data and the state."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import torch

from tresnet import env
from tresnet.checkpoints.weights import WeightsInfo, open_weights
from tresnet.engine import batch_size, rundir, state
from tresnet.engine import config as configs
from tresnet.engine.batch_size import MicroBatches
from tresnet.engine.config import TrainConfig
from tresnet.engine.console import Console
from tresnet.engine.distributed import Processes
from tresnet.engine.images import Splits, fingerprint_beside, open_splits
from tresnet.engine.resolve import resolve
from tresnet.engine.state import BEST, Identity, Progress, RunRecord
from tresnet.errors import ConfigError
from tresnet.ops.dispatch import runs_kernels
from tresnet.settings import BF16_CAPABILITY


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A run with a complete configuration, its data, and the micro-batches of each process."""

    record: RunRecord
    splits: Splits
    batches: MicroBatches
    run_dir: Path | None  # None if the directory must still be made
    resumed_from: Path | None  # file from which the state was read; None for a new run

    @property
    def config(self) -> TrainConfig:
        """The run's configuration."""
        return self.record.config


def make_plan(
    wanted: TrainConfig,
    resume: Path | None,
    processes: Processes,
    console: Console,
    held: contextlib.ExitStack,
    dry_run: bool = False,
) -> tuple[RunPlan, WeightsInfo | None, dict[str, Any] | None]:
    """Complete the configuration `wanted`, and read the state to resume (a collective).

    `resume` is the argument of `train`. `held` receives the lock of a resumed run's directory. With
    `dry_run` and `--gpu-memory`, no GPU is needed. Returns the plan, the weights that `--weights`
    names (None for a resumed run) and the state (None for a new run). Raises ConfigError if options
    contradict data, state or device, and BusyError if another process uses the directory.
    """
    absent = processes.device.type != "cuda" and wanted.compute.device != "cpu"
    # Without a GPU, a dry run assumes a GPU whose memory has the size that --gpu-memory gives.
    assumed = dry_run and absent and wanted.compute.gpu_memory is not None
    capability = BF16_CAPABILITY if assumed else env.capability(processes.device)
    wanted = configs.replace(wanted, amp=wanted.compute.decided(capability).amp)
    check_same_options(wanted, processes)
    run_dir = path = found = None
    if processes.is_main:
        run_dir, loaded = rundir.claim(wanted, resume, held, console.say)
        path, found = loaded or (None, None)
    run_dir, path = processes.from_main((run_dir, path))
    if path is not None and not processes.is_main:
        found = state.read(path)
    saved, content = found or (None, None)
    if wanted.model.impl == "triton" and not assumed:
        # This call raises an error if the kernels cannot run on the device.
        runs_kernels(processes.device, torch.float32, "triton")
    if saved is not None:
        assert run_dir is not None, "a state is in a directory"
        weights = None  # the state holds the weights
        filled = configs.resumed(configs.absolute(saved.config), wanted, run_dir / BEST)
    else:
        name = wanted.model.weights
        weights = None if name is None else open_weights(name)
        filled = resolve(wanted, weights)
    splits = open_splits(filled, processes)
    identity = Identity(
        world_size=processes.world_size if saved is None else saved.identity.world_size,
        **splits.fingerprints,
        beside=fingerprint_beside(filled),
        classes=tuple(splits.classes),
    )
    if saved is not None:
        state.check(saved.identity, identity)
    config = batch_size.resolve(filled, splits, weights, processes, console.say, assumed)
    images, progress = len(splits.train), Progress() if saved is None else saved.progress
    batches = batch_size.divide(config, identity.world_size, processes.world_size, images)
    if content is not None:
        before = batch_size.divide(config, identity.world_size, len(content["generators"]), images)
        # The number of processes may have changed, so keep the completed fraction of the epoch.
        progress.micro_batches = progress.micro_batches * batches.per_epoch // before.per_epoch
    record = RunRecord(config, identity, progress)
    return RunPlan(record, splits, batches, run_dir, path), weights, content


def check_same_options(config: TrainConfig, processes: Processes) -> None:
    """Raise `ConfigError` if processes have different options (a collective)."""
    if config.compute.sync_bn and processes.device.type != "cuda":
        raise ConfigError(
            "--sync-bn: PyTorch synchronises batch norm on GPUs only, expected one, got"
            f" {processes.device}: leave it out"
        )
    first, *others = processes.gather(configs.flatten(config))
    for rank, other in enumerate(others, start=1):
        if differing := configs.differences(first, other, "{!r} and {!r}"):
            raise ConfigError(
                f"expected the same options in all processes, got {', '.join(differing)} in process"
                f" 0 and {rank}: start each with the same, and look for processes of an earlier run"
            )
