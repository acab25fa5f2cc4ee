"""The check of kernels: it finds wrong ones, and launches what a model's steps can launch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tresnet
import tresnet.ops.autocast
from tests.fused.models import make
from tests.ops.kernels import DEVICE, large_tiles, poisoned_memory  # noqa: F401
from tresnet.fused import compare, read
from tresnet.layers.folded_conv import FoldedConv
from tresnet.ops import abn, launching
from tresnet.ops.abn import launch
from tresnet.ops.space_to_depth import launch as stem
from tresnet.surgery import fold


def changed(module: Any, name: str, *changes: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a function that patches the module so that its launch returns something else."""
    original = getattr(module, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        results = original(*args, **kwargs)
        if not isinstance(results, tuple):
            return changes[0](results)
        parts = zip(results, changes, strict=True)
        made = [part if part is None else change(part) for part, change in parts]
        return type(results)(*made) if hasattr(results, "_fields") else tuple(made)

    return lambda patch: patch.setattr(module, name, run)


def same(x: Any) -> Any:
    return x


def larger(x: Any) -> Any:
    return x * 1.1


def first_larger(grads: Any) -> Any:
    return grads._replace(fc1_weight=grads.fc1_weight * 1.1)


WRONG = {
    "output": changed(launch, "apply", larger, same),
    "mask": changed(launch, "apply", same, lambda mask: 255 - mask),
    "statistics": changed(launch, "statistics", larger, same),
    "squeeze": changed(launch, "squeeze", larger, same),
    "gate": changed(launch, "excite", same, same, larger),
    "hidden layer": changed(launch, "excite", same, larger, same),
    "gradient of the squeeze": changed(launch, "excite_grads", larger, same),
    "gradient of the SE": changed(launch, "excite_grads", same, first_larger),
    "gradient of x": changed(launch, "grad_apply", lambda y: y + 0.1),
    "masked gradient": changed(launch, "grad_sums", same, larger, same),
    "recomputed output": changed(launch, "grad_sums", same, same, larger),
    "gradients of vectors": changed(launch, "merge_grad_sums", larger),
    "values that are not written": changed(launch, "apply", lambda y: y * math.nan, same),
    "stem": changed(stem, "stem_input", larger),
}


@pytest.fixture
def subject(monkeypatch):
    """The smallest model that has all kernels."""
    monkeypatch.setattr(compare, "BATCHES", (2,))
    x = torch.rand(2, 3, 20, 20).to(memory_format=torch.channels_last)
    return compare.describe(list(make().body.named_children()), x, torch.float32)


def test_a_mode_makes_no_other_subject(subject):
    """A check runs all modes, so a model in eval mode is not checked again."""
    model, x = make(), torch.rand(2, 3, 20, 20).to(memory_format=torch.channels_last)
    modes = [
        compare.describe(list(model.train(trains).body.named_children()), x, torch.float32)
        for trains in (True, False)
    ]
    assert len({one._replace(children=()) for one in (*modes, subject)}) == 1
    assert not model.training


def test_a_later_block_that_differs_is_checked_too():
    model, subjects = make(layers=(5, 1, 1, 1)), []
    for _ in range(2):
        children = list(model.body.named_children())
        subjects.append(compare.describe(children, torch.rand(2, 3, 20, 20), torch.float32))
        model.body.layer1[4].conv1.bn.slope = None
    stages = [dict(subject.children)["layer1"] for subject in subjects]
    assert list(map(len, stages)) == [3, 4]
    assert stages[1][3].conv1.bn.slope is None
    assert subjects[0].text != subjects[1].text


@pytest.mark.slow
def test_right_kernels_pass(subject):
    compare.compare(subject, torch.device(DEVICE))


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_found(what, subject, monkeypatch):
    WRONG[what](monkeypatch)
    with pytest.raises(ArithmeticError, match=r"off by|differs from the sign"):
        compare.compare(subject, torch.device(DEVICE))


@pytest.fixture
def launched(monkeypatch):
    """A function that records variants on the meta device: five times as fast as fake tensors."""
    monkeypatch.undo()  # back to tiles of their own sizes
    autocast, autocast_dtype = torch.autocast, read.autocast_dtype

    def run(function, *args):
        with pytest.MonkeyPatch.context() as patch, launching.recorded_launches() as launches:
            patch.setattr(torch, "autocast", lambda _, *args, **kw: autocast("cpu", *args, **kw))
            # the meta device has no autocast
            for module in (read, tresnet.models.tresnet, tresnet.ops.autocast):
                patch.setattr(module, "autocast_dtype", lambda _: autocast_dtype("cpu"))
            function(*args)
        return {launch.variant() for launch in launches}

    return run


def run_steps(model, dtype, batch=64):
    """Run the steps of a model, on images as floats and as bytes."""
    images = torch.empty(batch, *model.pretrained_cfg["input_size"], device="meta")
    floats = images.to(next(model.parameters()).dtype)
    folded = isinstance(model.body.conv1, FoldedConv)
    runs = [(False, False)] if folded else [(True, False), (True, True), (False, False)]
    for trains, checkpoints in runs:
        model.set_grad_checkpointing(checkpoints)
        for x in (floats, images.to(torch.uint8)):
            with (
                torch.set_grad_enabled(trains),
                torch.autocast("meta", dtype, enabled=floats.dtype != dtype),
            ):
                y = model.train(trains).forward_features(x)
            if trains:
                y.sum().backward()


def assert_the_check_launches_all(name, dtype, converted, launched):
    """Check a model's variants, trained and folded; return its checks with their variants."""
    model = tresnet.create(name, num_classes=2, device="meta", impl="triton")
    model = model.to(dtype if converted else torch.float32)
    checks = []
    for which, least in ((model, 15), (fold(model.eval()), 5)):
        x = torch.empty(1, *model.pretrained_cfg["input_size"], device="meta")
        x = x.to(next(which.parameters()).dtype)
        subject = compare.describe(list(which.body.named_children()), x, dtype)
        checks.append((subject, launched(compare.run, subject, abn, torch.device("meta"))))
        own = launched(run_steps, which, dtype)
        assert len(own) >= least
        assert not own - checks[-1][1]
    return checks


def test_the_check_of_a_small_model_launches_every_variant(launched):
    checks = assert_the_check_launches_all("tresnet_t", torch.bfloat16, False, launched)
    for subject, variants in checks:  # as on the meta device, so with fake tensors
        assert variants == {launch.variant() for launch in compare.launches_of(subject)}


KINDS = [
    *((dtype, True) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((dtype, False) for dtype in (torch.bfloat16, torch.float16)),  # by autocast
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "converted"), KINDS)
@pytest.mark.parametrize("name", tresnet.list_models())
def test_the_check_launches_every_variant_of_every_model(name, dtype, converted, launched):
    assert_the_check_launches_all(name, dtype, converted, launched)
