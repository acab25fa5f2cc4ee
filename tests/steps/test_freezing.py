"""Steps that train a part of a model: the others keep their bits, and have no part in backward."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from tests.fused.models import images, make
from tests.live_storages import live_after
from tests.steps.stand_in import CPU, StandIn
from tests.toys import snapshot
from tresnet.errors import ConfigError
from tresnet.memory import Category, predict
from tresnet.settings import Compute, EmaConfig, OptimConfig, ScheduleConfig, Step, TrainingBuild
from tresnet.steps import StepHost, TrainingStep
from tresnet.steps.freezing import describe_trained, parts_of

# The modules of each part of a TResNet, by hand.
MODULES = {"stem": "body.conv1", **{f"layer{i}": f"body.layer{i}" for i in range(1, 5)}}
MODULES |= {"head": "head"}


def create(model, parts=None, host=None, ema=0.0, checkpoints=False, **optim):
    settings = Step(
        build=TrainingBuild(grad_checkpointing=checkpoints),
        compute=Compute(channels_last=False),
        optim=OptimConfig(train_only=parts, **optim),
        ema=EmaConfig(ema_decay=ema),
    )
    return TrainingStep(model, settings, StepHost(device=CPU, **(host or {})))


def train(step, numbers, images_of=lambda number: images()):
    replayed = []
    for number in numbers:
        torch.manual_seed(number)
        x = images_of(number)
        step.backward(x, torch.arange(len(x)) % 5, cross_entropy)
        replayed.append(step.replayed)
        step.optimizer_step(number)
    return replayed


def belongs(name, parts):
    return any(name.startswith(MODULES[part] + ".") for part in parts)


@pytest.mark.parametrize("kind", ["plain", "definitions", "batchnorm", "ml_decoder"])
@pytest.mark.parametrize(
    "parts", [("head",), ("layer4", "head"), ("stem", "layer2", "head"), ("layer1", "layer3")]
)
def test_gradients_are_those_of_a_model_frozen_by_hand_in_float64(kind, parts):
    options = {"batchnorm": {"norm": "batchnorm"}, "ml_decoder": {"head": "ml_decoder"}}
    runner = kind if kind == "definitions" else "plain"
    model = make(runner, **options.get(kind, {})).double()
    reference = copy.deepcopy(model)
    reference.runner = None
    for part in MODULES.keys() - set(parts):
        reference.get_submodule(MODULES[part]).requires_grad_(False).eval()
    step, x, labels = create(model, parts), images(torch.float64), torch.tensor([3, 1])
    torch.manual_seed(5)  # for the head's dropout
    expected = reference(x)
    cross_entropy(expected, labels).backward()
    torch.manual_seed(5)
    _, logits = step.backward(x, labels, lambda y, t: cross_entropy(y.double(), t))
    torch.testing.assert_close(logits, expected.float())
    parameters = [*zip(model.named_parameters(), reference.parameters(), strict=True)]
    for (name, ours), exact in parameters:
        # timm's ML-Decoder never trains its queries
        trains = belongs(name, parts) and not name.endswith("query_embed.weight")
        assert (ours.grad is not None) == (exact.grad is not None) == trains, name
        if ours.grad is not None:
            # the step's logits are rounded to float32, which moves them by 6e-8 of their size
            assert (ours.grad - exact.grad).norm() <= 1e-6 * exact.grad.norm() + 1e-12, name
    for (name, ours), exact in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("parts", "optim"),
    [
        (("head",), {"weight_decay": 0.1, "clip_grad": 1.0}),
        (("layer4", "head"), {"opt": "adamw", "layer_decay": 0.7, "weight_decay": 0.0}),
        (("stem", "layer3"), {"opt": "lamb", "layer_decay": 0.7}),
        (("layer2", "head"), {"weight_decay": 0.0, "momentum": 0.0}),
    ],
)
def test_frozen_parts_keep_their_bits_and_have_no_optimizer(parts, optim):
    step = create(make("plain", drop_path_rate=0.5), parts, ema=0.5, lr=0.1, **optim)
    before = snapshot(step.model)
    train(step, [1, 2])
    step.eval_model.eval()
    step.model.eval()  # as an evaluation does
    train(step, [3])
    for model in (step.model, step.model_ema.module):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]) != belongs(name, parts), name
    trained = {id(p) for name, p in step.model.named_parameters() if belongs(name, parts)}
    for tensors in (step.optimizer.state, *(g["params"] for g in step.optimizer.param_groups)):
        assert {id(tensor) for tensor in tensors} <= trained
    assert len(step.optimizer.state) == (len(trained) if optim.get("momentum") != 0 else 0)
    count = sum(p.numel() for p in step.model.parameters() if id(p) in trained)
    assert describe_trained(step.model).startswith(f"{count:,} of ")


@pytest.mark.parametrize("kind", ["plain", "definitions"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_nothing_is_saved_for_frozen_parts_in_front(kind, checkpoints):
    step = create(make(kind, layers=(2, 1, 1, 1)), ("layer4", "head"), checkpoints=checkpoints)
    x, model = images(), step.model
    alive = live_after(lambda: model(x), [x, *model.parameters(), *model.buffers()])
    maps = [shape for shape, _ in alive if shape[0] == 2]  # not the kernels of blurs
    assert maps
    # Maps inside layer3 have 32 channels; those in front of it have 20 or 10 rows.
    assert not any({32, 20, 10}.intersection(shape) for shape in maps), maps


def test_a_replayed_graph_has_the_bits_of_eager_steps_also_after_thawing():
    states, schedule = [], ScheduleConfig(epochs=1)
    for capturer in (None, StandIn):
        host = {"schedule": schedule, "total_steps": 16}
        step = create(make("definitions"), ("head",), host, ema=0.5, opt="adamw", lr=0.01)
        if capturer is not None:
            step.capture_with(capturer(step.model), say=lambda _: None)
        replayed = train(step, range(1, 7))
        step.train_only(("layer4", "head"))
        replayed += train(step, range(7, 13))
        step.train_only(None)
        replayed += train(step, range(13, 17))
        assert replayed == [
            capturer is not None and n >= 3 for n in (*range(6), *range(6), 0, 1, 2, 3)
        ]
        states.append(step.state_dict())
    for part in ("model", "model_ema"):
        for name, tensor in states[0][part].items():
            assert torch.equal(tensor, states[1][part][name]), name
    assert states[0]["schedule"] == states[1]["schedule"]


@pytest.mark.parametrize("kind", ["one-cycle", "cosine", "constant"])
def test_the_schedule_goes_on_where_it_was(kind):
    """Compare with the rates of a step that trains everything from the beginning."""
    host = {"schedule": ScheduleConfig(epochs=1, lr_schedule=kind), "total_steps": 8}
    options = {"layer_decay": 0.5, "lr": 0.1}
    thawed, whole = (create(make("plain"), parts, host, **options) for parts in (("head",), None))
    rates = []
    for number in range(1, 9):
        if number == 4:
            assert len(thawed.optimizer.state) == 2
            thawed.train_only(None)
            assert not thawed.optimizer.state
        train(thawed, [number])
        train(whole, [number])
        rates.append((thawed.lr, whole.lr))
    assert all(one == other for one, other in rates)
    assert thawed.state_dict()["schedule"]["last_epoch"] == 8
    groups = [step.optimizer.param_groups for step in (thawed, whole)]
    for one, other in zip(*groups, strict=True):
        assert (one["lr"], len(one["params"])) == (other["lr"], len(other["params"]))


def test_modes_of_ones_own_stay_without_frozen_parts():
    model = make("plain")
    model.body.eval().requires_grad_(False)
    step = create(model)
    before = snapshot(model.body)
    train(step, [1])
    assert all(torch.equal(t, before[name]) for name, t in model.body.state_dict().items())
    step.train_only(("layer4", "head"))
    step.train_only(None)
    assert not any(p.requires_grad for p in model.body.parameters())  # as it was


def test_timms_models_have_parts_by_their_own_groups():
    model = timm.create_model("resnet18")
    assert [*parts_of(model)] == ["stem", "layer1", "layer2", "layer3", "layer4", "head"]
    before = snapshot(model)
    step = create(model, ("layer4", "head"), lr=0.1)
    train(step, [1, 2], lambda _: torch.rand(2, 3, 64, 64))  # after one step, zeros still hide some
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith(("layer4.", "fc.")), name
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith(("layer4.", "fc.")), name
    vit = timm.create_model("test_vit")
    assert [*parts_of(vit)] == ["stem", *(f"layer{i}" for i in range(1, 7)), "head"]
    levit = timm.create_model("levit_128s", img_size=224)
    assert [*parts_of(levit)][-1] == "head"  # two of them
    assert [*parts_of(timm.create_model("resnet18", num_classes=0))][-1] == "layer4"


def test_unknown_parts_and_models_without_names_of_parts_are_refused():
    message = r"--train-only: expected parts of the model \(stem, layer1, .*, head\), got 'layer5'"
    with pytest.raises(ConfigError, match=message):
        create(make("plain"), ("layer5", "head"))
    with pytest.raises(ConfigError, match=r"got ResNet: set requires_grad of its parameters"):
        create(resnet18(), ("head",))
    with pytest.raises(ConfigError, match=r"layer3, layer4\), got 'head'"):
        create(make("plain", num_classes=0), ("head",))


def test_a_prediction_knows_what_is_frozen():
    parts = [None, ("layer3", "layer4", "head"), ("layer4", "head"), ("head",)]
    found = [predict("tresnet_t", train_only=each, batch_size=64, opt="adamw") for each in parts]
    peaks = [each.allocated.expected_bytes for each in found]
    assert peaks == sorted(set(peaks), reverse=True)
    assert "train_only layer4 head" in str(found[2])
    assert "train_only" not in str(found[0])
    held, head = found[3].by_category, nn.Linear(512, 1000)
    state = sum(2 * 4 * p.numel() for p in head.parameters())  # two values of AdamW
    assert held[Category.OPTIMIZER] == pytest.approx(state, rel=1e-3)
    assert held[Category.ACTIVATIONS] < 0.05 * found[0].by_category[Category.ACTIVATIONS]
