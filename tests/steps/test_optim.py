import math

import pytest
import torch
from torch import nn

from tests.toys import smallest
from tresnet.errors import ConfigError
from tresnet.settings import OptimConfig, ScheduleConfig
from tresnet.steps.optim import create_optimizer, create_schedule, peak_lr

OPTIM = OptimConfig(lr=0.4, momentum=0.8, weight_decay=3e-4)


def test_only_convolution_and_linear_weights_decay():
    model = smallest()
    optimizer = create_optimizer(model, OPTIM, 8)
    decay_of = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    decayed = {id(weight) for weight in weights}
    for name, parameter in model.named_parameters():
        expected = 3e-4 if id(parameter) in decayed else 0.0
        assert decay_of.pop(id(parameter)) == expected, name
    assert decay_of == {}
    assert isinstance(optimizer, torch.optim.SGD)
    assert all(group["nesterov"] and group["momentum"] == 0.8 for group in optimizer.param_groups)


def test_the_rate_scales_with_the_batch_if_asked_to():
    assert peak_lr(OPTIM, 1024) == 0.4
    assert peak_lr(OptimConfig(lr=0.1, lr_batch=256), 1024) == pytest.approx(0.4)
    optimizer = create_optimizer(smallest(), OptimConfig(lr=0.1, lr_batch=256), 64)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_layers_further_from_the_head_learn_at_lower_rates():
    model = smallest()
    optimizer = create_optimizer(model, OptimConfig(lr=0.4, layer_decay=0.5), 8)
    create_schedule(optimizer, ScheduleConfig(lr_schedule="constant", warmup_fraction=0.0), 9)
    groups = [(group, id(p)) for group in optimizer.param_groups for p in group["params"]]
    rates = {key: group["lr"] for group, key in groups}
    decays = {key: group["weight_decay"] for group, key in groups}
    layers = ("body.conv1", "body.layer1.0", "body.layer2.0", "body.layer3.0", "body.layer4.0")
    for name, parameter in model.named_parameters():
        depth = next((i for i, layer in enumerate(layers) if name.startswith(layer)), 5)
        assert rates[id(parameter)] == pytest.approx(0.4 * 0.5 ** (5 - depth)), name
        assert (decays[id(parameter)] > 0) == (parameter.ndim > 1), name


def test_sgd_without_momentum_is_plain_sgd():
    """PyTorch refuses Nesterov's form of it."""
    optimizer = create_optimizer(nn.Linear(2, 2), OptimConfig(momentum=0.0), 1)
    assert type(optimizer) is torch.optim.SGD
    assert all((g["momentum"], g["nesterov"]) == (0.0, False) for g in optimizer.param_groups)


def test_an_unknown_optimizer_and_one_of_second_derivatives_are_refused():
    with pytest.raises(ConfigError, match="a first-order optimizer, got 'adahessian': try adamw"):
        create_optimizer(smallest(), OptimConfig(opt="adahessian"), 64)
    with pytest.raises(ConfigError, match="--opt: timm builds no optimizer 'sgdd'"):
        create_optimizer(smallest(), OptimConfig(opt="sgdd"), 8)


def rates(config: ScheduleConfig, updates: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule = create_schedule(optimizer, config, updates)
    lrs = []
    for _ in range(updates):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return lrs


def test_one_cycle_is_torchs():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    options = {"pct_start": 0.3, "div_factor": 20, "final_div_factor": 1000}
    options["cycle_momentum"] = False
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, 50, **options)
    config = ScheduleConfig(warmup_fraction=0.3, start_factor=1 / 20, end_factor=1 / 20000)
    for rate in rates(config, 50):
        assert rate == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("updates", [1, 2, 3, 5, 7, 8, 10, 11])
def test_one_cycle_of_any_length_ends_at_its_last_rate(updates):
    """Include 5 steps, of which one is warm-up: there PyTorch's OneCycleLR divides by zero."""
    lrs = rates(ScheduleConfig(warmup_fraction=0.2), updates)
    assert len(lrs) == updates
    assert all(0 < rate <= 0.4 * (1 + 1e-6) for rate in lrs), lrs
    assert lrs[-1] < 0.01 or updates < 3, lrs
    lrs = rates(ScheduleConfig(warmup_fraction=1.0), updates)
    assert lrs == sorted(lrs)
    assert lrs[0] == pytest.approx(0.4 * 0.04)
    assert updates == 1 or lrs[-1] == pytest.approx(0.4)


def test_cosine_rises_along_a_line_and_falls_along_a_cosine_and_constant_stays():
    config = ScheduleConfig(
        lr_schedule="cosine", warmup_fraction=0.25, start_factor=0.2, end_factor=0.1
    )
    lrs = rates(config, 13)
    assert lrs[0] == pytest.approx(0.4 * 0.2)
    warm = 13 * 0.25
    assert lrs[2] == pytest.approx(0.4 * (0.2 + 0.8 * 2 / warm))
    middle = (7 - warm) / (12 - warm)
    assert lrs[7] == pytest.approx(0.4 * (0.1 + 0.9 * (1 + math.cos(math.pi * middle)) / 2))
    assert lrs[-1] == pytest.approx(0.4 * 0.1)
    config = ScheduleConfig(lr_schedule="constant", warmup_fraction=0.5, start_factor=0.5)
    assert rates(config, 4) == pytest.approx([0.2, 0.3, 0.4, 0.4])
