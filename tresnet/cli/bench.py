"""`tresnet bench`: compare the speed and the peak memory of models."""

from tresnet.cli.output import progress, report
from tresnet.measure.cases import BatchSizes, BenchCase, LayoutOpt, Models, parse_cases
from tresnet.measure.settings import LargestSettings, StepSettings
from tresnet.settings import Build, InferenceCompute, Input, InputSize
from tresnet.settings.fields import flatten, replace


def bench_train(
    models: Models, *, batch_size: BatchSizes = (64,), case: BenchCase, run: StepSettings
) -> int:
    """Time the training step of train.py, with its optimizer, on synthetic images."""
    return _time_steps(True, models, batch_size, case, run)


def bench_infer(
    models: Models,
    *,
    batch_size: BatchSizes = (64,),
    input_size: InputSize = None,
    input: Input = "float",
    layout_opt: LayoutOpt = False,
    build: Build,
    compute: InferenceCompute,
    run: StepSettings,
) -> int:
    """Time the inference step of eval.py on synthetic images."""
    case = BenchCase(input_size=input_size, input=input, layout_opt=layout_opt)
    case = replace(case, **flatten(build), **flatten(compute))
    return _time_steps(False, models, batch_size, case, run)


def bench_max_batch(
    models: Models, *, batch_size: BatchSizes = (64,), case: BenchCase, run: LargestSettings
) -> int:
    """Find the largest training batch that fits in memory, by running training steps."""
    from tresnet.measure.largest_batch import largest_batches

    outcome = largest_batches(parse_cases(models, batch_size, case), run, progress)
    return report(outcome, _LARGEST_TABLE)


def _time_steps(
    training: bool, models: Models, batch_size: BatchSizes, case: BenchCase, run: StepSettings
) -> int:
    from tresnet.measure.contenders import bench_models

    cases = parse_cases(models, batch_size, case)
    return report(bench_models(training, cases, run, progress), _STEP_TABLE)


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
