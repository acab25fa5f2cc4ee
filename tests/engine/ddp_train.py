"""Started by torchrun: CONFIG [--resume RUN_DIR] [--without-norms] [--replay] and what goes wrong.

--replay records the operators of a step and replays them, as CUDA graphs do;
--spoil RANK PASS makes a loss infinite,
--kill RANK UPDATE SIGNAL, again for after a restart, or --unlink FILE before the second update.
"""

import argparse
import functools
import itertools
import os
from pathlib import Path

from torch import nn

from tests.steps.stand_in import StandIn
from tresnet.cli import shell
from tresnet.engine import config as configs
from tresnet.engine import run
from tresnet.engine.train import train
from tresnet.steps import TrainingStep, training


def make_without_norms(change=setattr):
    """Let `run.create` build models whose norms only scale and shift, without batch statistics.

    Then a batch's gradient is the mean of the gradients of its micro-batches.
    """
    create = run.create

    def without_norms(*args, **kwargs):
        model = create(*args, **kwargs)
        for norm in model.modules():
            if hasattr(norm, "running_mean"):
                for parameter in norm.parameters():
                    nn.init.constant_(parameter, 0.5)
                norm.eval().train = lambda mode=True: None
        return model

    change(run, "create", without_norms)


def replay():
    capture_with = TrainingStep.capture_with
    training.uses_graph, training.CudaCapturer = (lambda *_: True), (lambda device: device)
    TrainingStep.capture_with = lambda self, _, **options: capture_with(
        self, StandIn(self.model), **options
    )


def before(rank, update, action, restarts=0):
    """Let one rank call `action` before an optimizer step, after `restarts` restarts."""
    original = TrainingStep.optimizer_step

    def updating(self, number):
        is_time = (int(os.environ["RANK"]), number) == (rank, update)
        if is_time and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == restarts:
            action()
        original(self, number)

    TrainingStep.optimizer_step = updating


def spoil(rank, number):
    """Make the loss of one rank in one micro-batch infinite, but not its gradients."""
    original, count = TrainingStep.backward, itertools.count(1)

    def spoilt(self, images, targets, criterion, *rest):
        bad = (int(os.environ["RANK"]), next(count)) == (rank, number)
        added = float("inf") if bad else 0.0
        return original(self, images, targets, lambda x, y: criterion(x, y) + added, *rest)

    TrainingStep.backward = spoilt


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--unlink", type=Path)
    parser.add_argument("--without-norms", action="store_true")
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--spoil", type=int, nargs=2)
    parser.add_argument("--kill", type=int, nargs=3, action="append")
    options = parser.parse_args()
    if options.without_norms:
        make_without_norms()
    if options.replay:
        replay()
    for restarts, (rank, update, signum) in enumerate(options.kill or []):
        before(rank, update, functools.partial(os.kill, os.getpid(), signum), restarts)
    if options.spoil:
        spoil(*options.spoil)
    if options.unlink:
        before(0, 2, options.unlink.unlink)

    def main():
        stopped_by = train(configs.load(options.config), options.resume).stopped_by
        return 128 + stopped_by if stopped_by else 0

    if code := shell.run(main):
        shell.leave(code)  # torchrun waits for ever for what a fork that leaves with 0 would return
