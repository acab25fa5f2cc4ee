import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tests.engine.runs import ALONE
from tests.toys import smallest
from tresnet.engine.batch_size import MicroBatches
from tresnet.engine.run import training_step
from tresnet.settings import Compute, Step
from tresnet.steps import InferenceStep, StepHost, TrainingStep

PLAIN = {"mixup": 0.0, "drop_rate": 0.0, "drop_path_rate": 0.0, "label_smoothing": 0.0}


def test_strides_of_1x1_weights_give_no_warning():
    """Here oneDNN, as cuDNN for an SE, gives their gradients other strides than they have."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_warn_always(True)  # otherwise PyTorch warns once a process
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten())
    images = torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last)
    batch = images, torch.arange(2), nn.CrossEntropyLoss()
    try:
        plain = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits = plain(images)
        with pytest.warns(UserWarning, match="Grad strides do not match bucket view strides"):
            logits.sum().backward()
        settings = Step(compute=Compute(amp="bf16", channels_last=False))
        step = TrainingStep(model, settings, StepHost(device=ALONE.device, world_size=2))
        step.backward(*batch)  # a warning would be an error
    finally:
        torch.set_warn_always(False)
        dist.destroy_process_group()


class NormFree(nn.Module):
    """A model whose batch is the mean of its halves, as no batch norm can be."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 3)
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3)))


def step_of(config, model=None, updates=6):
    if model is None:
        torch.manual_seed(0)
        model = smallest()
    batches = MicroBatches(
        config.batch_size, config.step.optim.accumulate, updates * config.step.optim.accumulate
    )
    return training_step(model, config, ALONE, batches)


def batch(n=8):
    generator = torch.Generator().manual_seed(5)
    return torch.rand(n, 3, 12, 12, generator=generator), torch.arange(n) % 3


def run(step, images, targets, micro_batches=1, number=1):
    criterion = nn.CrossEntropyLoss()
    parts = list(zip(images.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
    for part, (x, y) in enumerate(parts, start=1):
        result = step.backward(x, y, criterion, micro_batches, part == micro_batches)
    step.optimizer_step(number)
    return result


def test_accumulated_micro_batches_are_one_step_over_their_mean(tiny):
    once = step_of(tiny(**PLAIN, batch_size=8), NormFree())
    parts = step_of(tiny(**PLAIN, batch_size=4, accumulate=2), NormFree())
    run(once, *batch())
    run(parts, *batch(), micro_batches=2)
    for name, weight in once.model.state_dict().items():
        # the sum of two half-batch means differs from one mean by float32 rounding alone
        torch.testing.assert_close(parts.model.state_dict()[name], weight, rtol=1e-5, atol=1e-7)


def kept(step):
    """Return copies of all values of a step's state but those of its schedule."""
    content = step.state_dict()
    del content["schedule"], content["lr"]
    for group in content["optimizer"]["param_groups"]:
        del group["lr"]
    return copy.deepcopy(tree_leaves(content))


@pytest.mark.parametrize("bad", [1, 2])
def test_a_loss_without_a_number_is_bad_and_a_skipped_step_changes_nothing(tiny, bad):
    """Add infinity to the loss of either micro-batch, which leaves all gradients finite."""
    options = {"accumulate": 2, "skip_bad_steps": 1, "opt": "momentum", "ema_decay": 0.9}
    step = step_of(tiny(**PLAIN, batch_size=4, **options))
    run(step, *batch(), micro_batches=2)  # momenta exist now
    before = kept(step)
    for part in (1, 2):
        spoilt = torch.inf if part == bad else 0.0
        step.backward(*batch(4), lambda x, y, add=spoilt: x.square().mean() + add, 2, part == 2)
    assert step.is_bad()
    step.skip()
    for value, expected in zip(kept(step), before, strict=True):
        assert torch.equal(value, expected) if torch.is_tensor(value) else value == expected
    run(step, *batch())
    assert not step.is_bad()


def test_clipping_limits_the_gradient(tiny):
    step = step_of(tiny(**PLAIN, clip_grad=1e-3, lr_schedule="constant", opt="momentum"))
    for group in step.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1.0, 0.0
    before = copy.deepcopy(list(step.model.parameters()))
    run(step, *batch())
    moved = torch.stack(
        [(a - b).norm() for a, b in zip(before, step.model.parameters(), strict=True)]
    )
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_ema_follows_timms_warm_up(tiny):
    step = step_of(tiny(**PLAIN, ema_decay=0.9, lr=0.5))
    run(step, *batch(), number=1)
    first = step.model.head.fc.weight.detach().clone()
    torch.testing.assert_close(step.model_ema.module.head.fc.weight, first, rtol=0, atol=0)
    run(step, *batch(), number=2)
    decay = 1 - 2 ** (-2 / 3)  # at the first step past the start, with timm's power of 2/3
    expected = decay * first + (1 - decay) * step.model.head.fc.weight
    torch.testing.assert_close(step.model_ema.module.head.fc.weight, expected)
    assert step.eval_model is step.model_ema.module


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_precisions_learn_alike_and_only_fp16_scales_the_loss(tiny, amp):
    step = step_of(tiny(**PLAIN, amp=amp, lr=0.1, lr_schedule="constant"))
    assert step.scaler.is_enabled() == (amp == "fp16")
    losses = [run(step, *batch(), number=n)[0].item() for n in range(1, 9)]
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.dtype == torch.float32 for p in step.model.parameters())
    images, _ = batch()
    tested = InferenceStep(step.eval_model, Compute(amp=amp), ALONE.device)
    assert tested(images).dtype == torch.float32
    assert not step.eval_model.training


def test_channels_last_reaches_weights_ema_and_images(tiny):
    step = step_of(tiny(**PLAIN, channels_last=True))
    images, _ = step.feed(*batch())
    convolutions = [m for m in step.model.modules() if isinstance(m, nn.Conv2d)]
    averaged = [m for m in step.eval_model.modules() if isinstance(m, nn.Conv2d)]
    for tensor in [images, *(m.weight for m in convolutions + averaged)]:
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    run(step, *batch())


def test_bad_weights_are_seen_and_settings_reach_the_step(tiny):
    step = step_of(tiny(grad_checkpointing=True, ema_decay=0.0))
    assert step.model.grad_checkpointing is True
    assert step.model_ema is None
    assert step.eval_model is step.model
    assert step.is_finite()
    step.model.body.layer4[0].conv1.bn.running_var[0] = float("inf")
    assert not step.is_finite()


def test_a_compiled_model_learns_the_same(tiny, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **_: compiler(module, backend="aot_eager"))
    eager, compiled = (
        step_of(tiny(**PLAIN, compile=compile), NormFree()) for compile in ("none", "default")
    )
    for step in (eager, compiled):
        run(step, *batch())
    for name, weight in eager.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], weight)
    images, _ = batch()
    tested = [
        InferenceStep(step.eval_model, Compute(compile=mode), ALONE.device)
        for step, mode in ((eager, "none"), (compiled, "default"))
    ]
    torch.testing.assert_close(tested[1](images), tested[0](images))
    assert set(compiled.state_dict()["model"]) == set(NormFree().state_dict())
