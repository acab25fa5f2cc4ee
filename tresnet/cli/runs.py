"""`tresnet runs`: what train.py has written, listed, compared and drawn."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg, subcommand

from tresnet.cli.output import PARTLY_FAILED_EXIT_CODE, fail, format_table, say
from tresnet.errors import TResNetError

if TYPE_CHECKING:
    from tresnet.engine.runs import Run

_FIGURES = {
    "val_top1": ("best top-1", ".2f"),
    "val_map": ("best mAP", ".2f"),
    "loss": ("loss", ".4f"),
    "val_loss": ("val loss", ".4f"),
    "images_per_s": ("images/s", ".0f"),
    "data_wait_pct": ("waiting %", ".0f"),
    "max_allocated_mib": ("peak MiB", ".0f"),
    "rss_peak_mib": ("process MiB", ".0f"),
    "elapsed_s": ("elapsed s", ".0f"),
}


@dataclasses.dataclass(frozen=True)
class _Runs:
    directories: Annotated[Positional[tuple[Path, ...]], arg(metavar="[DIR ...]")] = (Path("runs"),)
    """Directories of runs, or directories that hold some."""

    def run(self, argv: list[str]) -> int:
        """Read each run; those that cannot be read are named, and the others shown."""
        from tresnet.engine import runs

        found: list[Run] = []
        failed = False
        for directory in runs.find(self.directories):
            try:
                found.append(runs.read(directory))
            except TResNetError as error:
                fail(error)
                failed = True
        if found:
            failed |= self.show(found)
        return PARTLY_FAILED_EXIT_CODE if failed else 0

    def show(self, found: "list[Run]") -> bool:
        """Print what was read; returns whether some of it could not be."""
        raise NotImplementedError


class RunsList(_Runs):
    """List runs: recipe, model, whole epochs, best score in percent, speed and state."""

    def show(self, found: "list[Run]") -> bool:
        """Print a line for each run."""
        header = ["run", "recipe", "model", "epochs", "best %", "images/s", "state"]
        lines = []
        for run in found:
            figures = run.figures()
            score = figures["val_map"] if run.config.labels.multi else figures["val_top1"]
            lines.append(
                [
                    *(run.name, run.config.recipe, run.config.model.model or "-"),
                    f"{len(run.epochs)}/{run.config.schedule.epochs}",
                    *(_cell(score, ".2f"), _cell(figures["images_per_s"], ".0f"), run.state),
                ]
            )
        say(format_table(header, lines))
        return False


class RunsCompare(_Runs):
    """Compare runs: the options that differ, and what came of it."""

    def show(self, found: "list[Run]") -> bool:
        """Print a column for each run."""
        from tresnet.engine.runs import differing

        table = [[name, *map(str, values)] for name, values in differing(found).items()]
        table.append(["epochs", *(str(len(run.epochs)) for run in found)])
        figures = [run.figures() for run in found]
        for name, (title, how) in _FIGURES.items():
            if any(one[name] is not None for one in figures):
                table.append([title, *(_cell(one[name], how) for one in figures)])
        say(format_table(["", *(run.name for run in found)], table))
        return False


class RunsShow(_Runs):
    """Draw loss, accuracy, images/s, waiting and memory into each run's directory: run.svg."""

    def show(self, found: "list[Run]") -> bool:
        """Draw what has a whole epoch, also while it runs."""
        from tresnet.engine.runs import draw

        failed = False
        for run in found:
            try:
                say(str(draw(run)))
            except TResNetError as error:
                fail(error)
                failed = True
        return failed


@dataclasses.dataclass(frozen=True)
class Runs:
    """List, compare and draw the runs of train.py."""

    task: (
        Annotated[RunsList, subcommand("list")]
        | Annotated[RunsCompare, subcommand("compare")]
        | Annotated[RunsShow, subcommand("show")]
    )

    def run(self, argv: list[str]) -> int:
        """Run the chosen command."""
        return self.task.run(argv)


def _cell(value: Any, how: str) -> str:
    return "-" if value is None else format(value, how)
