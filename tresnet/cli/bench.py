"""`tresnet bench`: compare the speed and the peak memory of models."""

import dataclasses
from typing import Annotated, ClassVar

from tyro.conf import subcommand

from tresnet.cli.output import progress, report
from tresnet.measure.cases import Cases
from tresnet.measure.settings import LargestSettings, StepSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchTrain(StepSettings, Cases):
    """Time the training step of train.py, with its optimizer, on synthetic images."""

    training: ClassVar = True

    def run(self, argv: list[str]) -> int:
        from tresnet.measure.contenders import bench_models

        return report(bench_models(self.training, self.cases(), self, argv, progress), _STEP_TABLE)


class BenchInfer(BenchTrain):
    """Time the inference step of eval.py on synthetic images."""

    training = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchMaxBatch(LargestSettings, Cases):
    """Find the largest training batch that fits in memory, by running training steps."""

    def run(self, argv: list[str]) -> int:
        from tresnet.measure.largest_batch import largest_batches

        return report(largest_batches(self.cases(), self, argv, progress), _LARGEST_TABLE)


Bench = (
    Annotated[BenchTrain, subcommand("train")]
    | Annotated[BenchInfer, subcommand("infer")]
    | Annotated[BenchMaxBatch, subcommand("max-batch")]
)

_STEP_TABLE = [
    ("size", "input_size", ""),
    ("p20 img/s", "p20_images_per_s", ".1f"),
    ("p50 img/s", "p50_images_per_s", ".1f"),
    ("p80 img/s", "p80_images_per_s", ".1f"),
    ("x first", "ratio_to_first", ".3f"),
    ("peak MiB", "max_allocated_mib", ".1f"),
]
_LARGEST_TABLE = [
    ("largest batch", "largest_batch", ""),
    ("ended by", "limited_by", ""),
    ("peak MiB", "max_allocated_mib", ".1f"),
]
