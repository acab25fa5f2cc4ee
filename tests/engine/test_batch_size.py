"""`--batch-size auto`, and what a run says when the GPU's memory is full."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.engine.runs import (
    ALONE,
    CPU,
    assert_same_run,
    at_calls,
    resolved,
    rows_of,
    train_main,
)
from tests.live_storages import Births
from tests.steps.stand_in import StandIn
from tresnet.cli.commands import parse
from tresnet.cli.memory import memory_max_batch
from tresnet.data.crops import device_bytes
from tresnet.engine import batch_size, recovery, train
from tresnet.engine import config as configs
from tresnet.engine.batch_size import MicroBatches, divide
from tresnet.engine.distributed import Processes
from tresnet.engine.losses import Losses
from tresnet.engine.recipes import recipe
from tresnet.engine.resolve import fill
from tresnet.engine.run import Run, create_model, training_step
from tresnet.errors import ConfigError, TrainingError
from tresnet.memory import Device, MaxBatch, capacity, present_device
from tresnet.memory.capacity import Fits, fits
from tresnet.memory.device import GIB, MIB
from tresnet.memory.plan import make_plan
from tresnet.memory.prediction import record
from tresnet.memory.replay import peak_live_bytes
from tresnet.settings.fields import flatten
from tresnet.steps import InferenceStep, TrainingStep, training
from tresnet.steps.optim import peak_lr

CLASSES = [str(digit) for digit in range(10)]
BARE = Device("bare", cublas_workspace_bytes=0)
# On which some, not all, of the 26 images of the tests' data fit if they have 40 pixels a side.
SMALL = Device("small", 29 * MIB, 0, context_low_bytes=0, context_bytes=0, context_high_bytes=0)
SIDE, FITTING = 40, 23


@pytest.fixture
def small_gpu(monkeypatch):
    """The CPU passes for a GPU of 29 MiB."""
    monkeypatch.setattr(batch_size, "gpu_of", lambda *_: SMALL)


def answer(monkeypatch, images):
    """The predictor, which takes seconds, says that so many images fit."""

    def largest(model, config, classes, processes):
        assert processes.met, "NCCL takes up to 1 GB when processes first meet"
        return MaxBatch(images, images + 1, SMALL)

    monkeypatch.setattr(batch_size, "largest", largest)


class Several(Processes):
    """Stand-in for several processes; another process has memory for `room` images."""

    room, met = 10**9, False

    def barrier(self):
        self.met = True

    def max(self, *values):
        return [max(value, -self.room) for value in values]


def chosen(config, images, world_size=1):
    """Return the size of `--batch-size auto` for a number of images, and the line that says so."""
    console = Mock()
    processes = Several(0, world_size, CPU, console)
    filled = fill(configs.replace(config, batch_size="auto"))
    found = batch_size.resolve(filled, None, CLASSES, images, processes)
    return found.batch_size, console.say.call_args.args[0]


def held_by_the_step(config):
    """Bytes of live tensors at the peak of two optimizer steps, on the CPU and for real."""
    peak = Births()
    with peak:
        batch, size, multi = config.batch_size, config.data.input_size, config.labels.multi
        micro_batches = config.step.optim.accumulate
        batches = MicroBatches(batch, micro_batches, 10)
        made = training_step(create_model(config, CLASSES), config, ALONE, batches)
        losses = Losses(config, CLASSES, 0)
        for step in range(2 * micro_batches):
            labels = torch.randint(2, (batch, 10)).float() if multi else torch.arange(batch) % 10
            images = torch.randint(256, (batch, 3, size, size), dtype=torch.uint8)
            x, labels = made.feed(images, labels)
            del images
            x, targets, criterion = losses.prepare(x, labels, 0, step)
            is_last = step % micro_batches == micro_batches - 1
            result = made.backward(x, targets, criterion, micro_batches, is_last)
            del x, labels, targets
            if is_last:
                made.optimizer_step(step // micro_batches + 1)
        del result
    return peak.peak_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"grad_checkpointing": True, "amp": "bf16", "channels_last": False},
        {"recompute": "none", "accumulate": 2, "clip_grad": 1.0, "opt": "lamb", "mixup": 0.2},
        {"norm": "batchnorm", "loss": "asymmetric", "label_smoothing": 0.0, "ema_decay": 0.0},
        {"train_only": ("layer4", "head"), "opt": "adamw"},
        {"train_only": ("layer2", "head"), "norm": "batchnorm", "clip_grad": 1.0},
    ],
    ids=str,
)
def test_the_predicted_step_is_the_one_that_runs(changes):
    options = {"batch_size": 32, "layers": (1, 1, 1, 1), "amp": "off", **changes}
    config = resolved(configs.replace(recipe("digits"), **options))
    model = create_model(config, CLASSES)
    plan = batch_size.plan_of(config, BARE, CLASSES, 1)
    changes = {"batch_size": 32, "loader_bytes": 0}
    _, model, plan = make_plan(model, configs.replace(plan, **changes))
    trace = record(model, plan, BARE, device_type="cpu")
    # Buffers are rounded up to 512 B, which is 0.3 to 0.6 % here.
    ratio = peak_live_bytes(trace) / held_by_the_step(config)
    assert 1 <= ratio < 1.01


def test_a_prediction_has_crops_and_plain_modules_for_synchronised_norms(
    tiny, small_gpu, monkeypatch
):
    """A crop has an arena of 4 images, and 3 images between the layers of a policy."""
    asked = Mock()
    monkeypatch.setattr(capacity, "largest_batch", asked)
    model = create_model(resolved(tiny(input_size=SIDE)), CLASSES)
    for sync_bn, runner in ((True, None), (False, model.runner)):
        batch_size.largest(model, fill(tiny(input_size=SIDE, sync_bn=sync_bn)), CLASSES, ALONE)
        assert asked.call_args.args[0].runner is runner
    assert model.runner is not None
    asked_plan, held = asked.call_args.args[1], []
    assert asked_plan.loader_bytes == device_bytes((SIDE, SIDE)) == 7 * 3 * SIDE**2
    for loader_bytes in (0, asked_plan.loader_bytes):
        changes = {"batch_size": 8, "device": BARE, "loader_bytes": loader_bytes}
        _, module, plan = make_plan(model, configs.replace(asked_plan, **changes))
        held.append(peak_live_bytes(record(module, plan, BARE)))
    assert held[1] - held[0] == pytest.approx(8 * 7 * 3 * SIDE**2, abs=512)


def test_evaluation_has_memory_beside_the_graph_of_a_step(tiny, small_gpu, monkeypatch):
    config = resolved(tiny(input_size=SIDE, impl="plain"))
    model = create_model(config, CLASSES)
    monkeypatch.setattr(batch_size, "uses_graph", lambda *_: True)
    size = batch_size.largest(model, config, CLASSES, ALONE).batch_size

    def recorded(images):
        plan = batch_size.plan_of(config, SMALL, CLASSES, 1)
        _, module, plan = make_plan(model, configs.replace(plan, batch_size=images))
        return record(module, plan, SMALL)

    with Births() as evaluation:
        step = InferenceStep(model, config.step.compute, CPU)
        step(step.feed.images(torch.zeros(size, 3, SIDE, SIDE, dtype=torch.uint8)))
    crops = size * device_bytes((SIDE, SIDE))
    held = peak_live_bytes(recorded(size)) + evaluation.peak_bytes + crops
    assert held <= SMALL.capacity_bytes
    assert fits(recorded(size + 1), SMALL) is Fits.YES, "of the step alone, more would fit"


@pytest.mark.slow
def test_a_run_takes_the_largest_batch_that_is_sure_to_fit(tiny, small_gpu, capsys):
    config = tiny(batch_size="auto", input_size=SIDE, epochs=1, lr=0.02, lr_batch=4)
    run_dir = train.train(config).run_dir
    saved = configs.load(run_dir / "config.json")
    batch = saved.batch_size
    assert batch == FITTING - FITTING % 8
    out = capsys.readouterr().out
    assert f"--batch-size auto: {batch} on each of 1 process;" in out
    assert f"{batch} images per step" in out
    assert rows_of(run_dir)[0]["step"] == 26 // batch
    config = configs.replace(config, batch_size=batch, name="number")
    assert_same_run(run_dir, train.train(config).run_dir)  # the prediction changes nothing
    assert peak_lr(saved.step.optim, batch) == pytest.approx(0.02 * batch / 4)


def test_resuming_with_auto_keeps_the_batch_of_the_run(tiny, small_gpu, capsys):
    config = tiny(batch_size="auto")
    assert configs.from_json(configs.to_json(config), "x") == config
    first = train.train(tiny(batch_size=4, epochs=1))
    before = {path: path.stat().st_mtime_ns for path in first.run_dir.iterdir()}
    capsys.readouterr()
    assert train_main(f"--resume {first.run_dir} --batch-size auto --dry-run") == 0
    assert configs.from_json(capsys.readouterr().out, "x").batch_size == 4
    del before[first.run_dir / ".lock"]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    again = train.train(tiny(batch_size="auto", epochs=1), first.run_dir)
    assert again.run_dir == first.run_dir
    assert configs.load(again.run_dir / "config.json").batch_size == 4


@pytest.mark.parametrize(
    ("fitting", "images", "world_size", "room", "expected"),
    [
        (21, 1000, 1, 10**9, 16),
        (21, 1000, 2, 8, 8),  # the process with the least memory decides
        (43_688, 1438, 1, 10**9, 1432),  # no more than there are to train on
        (43_688, 1438, 4, 10**9, 352),
        (43_688, 7, 1, 10**9, 6),  # mixup pairs images
        (43_688, 1, 1, 10**9, 1),
    ],
)
def test_the_least_memory_and_the_data_limit_the_batch(
    tiny, monkeypatch, fitting, images, world_size, room, expected
):
    answer(monkeypatch, fitting)
    monkeypatch.setattr(Several, "room", room)
    size, line = chosen(tiny(), images, world_size)
    assert size == expected
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    assert line.startswith(f"--batch-size auto: {size} on each of {processes}; here")
    assert f"{fitting} images are predicted to fit into 29.0 MiB of small" in line
    assert line.endswith(f"and there are {images // world_size} to train on")


def test_a_batch_that_cannot_be_predicted_or_does_not_fit_is_an_error(tiny, small_gpu, monkeypatch):
    for name, value in (("teacher", "tag"), ("jit", True)):
        with pytest.raises(ConfigError, match=f"give a number: no prediction with --{name}"):
            chosen(tiny(**{name: value}), 1000)
    answer(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"not even one image is predicted to fit into 29\.0 MiB"):
        chosen(tiny(), 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [None, "1GiB", "999GiB"])
def test_free_memory_and_that_of_our_allocator_may_be_limited_but_not_invented(tiny, allowed):
    held = torch.zeros(2**28, device="cuda")
    gpu, whole = (
        batch_size.gpu_of(tiny(gpu_memory=allowed), torch.device("cuda", 0)),
        present_device(0),
    )
    free_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() >= held.nbytes
    assert whole.capacity_bytes == torch.cuda.get_device_properties(0).total_memory
    expected = GIB if allowed == "1GiB" else free_bytes
    assert gpu.capacity_bytes == pytest.approx(expected, abs=64 * MIB)
    assert gpu.context_low_bytes == 0  # an existing context is counted once
    assert gpu.context_high_bytes < whole.context_high_bytes


@pytest.mark.parametrize(
    ("began", "batch", "accumulate", "world_size", "images", "expected"),
    [
        (8, 128, 1, 8, 1281167, (128, 1, 1251)),
        (8, 128, 1, 4, 1281167, (128, 2, 2502)),  # 2502 micro-batches of 512
        (8, 128, 1, 16, 1281167, (64, 1, 1251)),
        (8, 96, 1, 6, 1281167, (64, 2, 3336)),
        (2, 2, 4, 1, 26, (2, 8, 12)),
        (4, 2, 1, 2, 31, (2, 2, 6)),  # 24 images an epoch, though there are 28
    ],
)
def test_other_processes_divide_the_same_steps(
    began, batch, accumulate, world_size, images, expected
):
    config = configs.replace(recipe("digits"), batch_size=batch, accumulate=accumulate, mixup=0.2)
    made = divide(config, began, world_size, images)
    assert made == MicroBatches(*expected)
    assert made.images_per_step * world_size == batch * accumulate * began
    with pytest.raises(ConfigError, match="which can't be divided among 17: use"):
        divide(config, began, 17, images)
    mixed = "of which each of 8 would mix an odd number, but mixing is in pairs: use 2 processes"
    with pytest.raises(ConfigError, match=mixed):
        divide(configs.replace(config, batch_size=4, accumulate=1), 2, 8, images)


@pytest.mark.parametrize(
    ("batch", "saved"),
    [(2, "the last good checkpoint is of step 1: continue"), (1, "there is no checkpoint yet")],
)
def test_full_memory_ends_the_run_with_what_to_do(tiny, monkeypatch, batch, saved):
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    at_calls(monkeypatch, TrainingStep, "backward", {batch}, before=Mock(side_effect=full))
    config = tiny(
        batch_size=24, epochs=3, ema_decay=0.5, grad_checkpointing=True, gpu_memory="4GiB"
    )
    with pytest.raises(TrainingError) as error:
        train.train(config)
    first, second, third, last = str(error.value).splitlines()
    assert first == f"the GPU's memory is full with --batch-size 24: {full}"
    assert saved in second
    program, *arguments = third.partition("predicted: ")[2].split()
    assert program == "tresnet"
    command = parse(arguments)
    assert command.func is memory_max_batch
    assert command.keywords["model"] == "tresnet_t"
    chosen = {"ema_decay": 0.5, "grad_checkpointing": True, "gpu_memory": "4GiB"}
    assert flatten(command.keywords["prediction"]).items() >= chosen.items()
    assert last == (
        "  a resumed run keeps its options; for a new run, try --batch-size 12 --accumulate 2,"
        " which keeps 24 images per step; or --amp auto; or a smaller --input-size or --model"
    )
    assert Path(config.run.runs, "run").exists() == (batch == 2)


@pytest.fixture
def replaying(monkeypatch):
    """Steps on a CPU record their operators and replay them, as CUDA graphs do."""
    capture_with = TrainingStep.capture_with
    monkeypatch.setattr(training, "uses_graph", lambda *_: True)
    monkeypatch.setattr(training, "CudaCapturer", lambda device: device)
    monkeypatch.setattr(
        TrainingStep,
        "capture_with",
        lambda step, _, **say: capture_with(step, StandIn(step.model), **say),
    )


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
def test_an_evaluation_without_memory_drops_the_graphs_and_begins_again(
    tiny, monkeypatch, replaying, capsys
):
    expected = train.train(tiny(name="expected")).run_dir
    capsys.readouterr()
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    at_calls(monkeypatch, InferenceStep, "__call__", {2}, before=full)
    assert_same_run(train.train(tiny()).run_dir, expected)
    out = capsys.readouterr().out
    assert out.count("begins again without the CUDA graphs of the training step") == 1
    assert out.count("batches of 4 run as a CUDA graph") == 2
    at_calls(monkeypatch, InferenceStep, "__call__", {2, 3}, before=full)
    with pytest.raises(TrainingError, match="the GPU's memory is full with --batch-size 4"):
        train.train(tiny(name="still full"))


@pytest.mark.gpu
def test_an_evaluation_on_a_full_gpu_drops_the_graphs_and_begins_again(tiny, monkeypatch, capsys):
    """The memory is limited to what the step holds, and to 8 MiB more."""
    options = {"device": "cuda", "epochs": 2, "batch_size": 8, "input_size": 256, "amp": "off"}
    total = torch.cuda.get_device_properties(0).total_memory

    def limit(*_):
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + 8 * MIB
        torch.cuda.set_per_process_memory_fraction(allowed / total)

    def whole(*_):
        torch.cuda.set_per_process_memory_fraction(1.0)

    at_calls(monkeypatch, Run, "evaluate", {1}, before=limit, after=whole)
    try:
        run_dir = train.train(tiny(**options)).run_dir
    finally:
        whole()
    out = capsys.readouterr().out
    assert out.count("begins again without the CUDA graphs of the training step") == 1
    assert len(rows_of(run_dir)) == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch_size": 512, "accumulate": 3}, "--batch-size 256 --accumulate 6, which"),
        ({"batch_size": 10, "mixup": 0.2}, "--batch-size 2 --accumulate 5, which"),
        ({"batch_size": 1, "norm": "batchnorm", "amp": "fp16"}, "--norm abn"),
        ({"batch_size": 1, "amp": "bf16"}, "--grad-checkpointing"),
    ],
)
def test_remedies_name_the_options(tiny, changes, expected):
    config = tiny(**{"mixup": 0.0, **changes})
    batches = MicroBatches(config.batch_size, config.step.optim.accumulate, 100)
    ways = list(recovery.remedies(config, batches))
    assert ways[0].startswith(expected)
    assert ways[-1] == "a smaller --input-size or --model"
