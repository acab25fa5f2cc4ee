"""Rebuilding saved activations: when it happens, when not, and that nothing goes wrong silently."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from tests.ops.kernels import DEVICE
from tresnet.ops import recompute
from tresnet.ops.blur_pool import blur_pool
from tresnet.ops.space_to_depth import stem_input


class Doubler:
    """y = 2 x, offered for recomputation; counts how often it is rebuilt."""

    def __init__(self):
        self.rebuilt = 0

    def again(self, x):
        self.rebuilt += 1
        return x * 2

    def __call__(self, x):
        y = x * 2
        recompute.offer(y, self.again, x)
        return y


@pytest.fixture
def doubler():
    return Doubler()


@pytest.fixture
def x():
    return torch.randn(3, 4, requires_grad=True)


def gradient(y, x):
    return torch.autograd.grad(y.sum(), x)[0]


def test_rebuilds_what_is_saved_and_gives_the_same_gradient(doubler, x):
    with recompute.scope():
        y = doubler(x).square()
    assert doubler.rebuilt == 0
    assert torch.equal(gradient(y, x), 8 * x)
    assert doubler.rebuilt == 1


def test_chains_of_offers(doubler, x):
    with recompute.scope():
        y = doubler(doubler(x)).square()
    assert torch.equal(gradient(y, x), 32 * x)
    assert doubler.rebuilt == 2


@pytest.mark.parametrize("scope", [lambda: recompute.scope(active=False), torch.enable_grad])
def test_outside_a_scope_nothing_is_rebuilt(doubler, x, scope):
    with scope():
        y = doubler(x).square()
    assert torch.equal(gradient(y, x), 8 * x)
    assert doubler.rebuilt == 0


def test_a_changed_tensor_is_kept_instead(doubler, x):
    """After an in-place change the function no longer gives the tensor that is saved."""
    with recompute.scope():
        y = doubler(x)
        y.add_(1)
        z = y.square()
    assert torch.equal(gradient(z, x), 4 * (2 * x + 1))
    assert doubler.rebuilt == 0


def test_a_view_of_other_shape_is_kept(doubler, x):
    with recompute.scope():
        z = doubler(x).view(4, 3).square()
    assert torch.equal(gradient(z, x), 8 * x)
    assert doubler.rebuilt == 0


def test_in_place_change_of_a_kept_tensor_is_still_detected(x):
    with recompute.scope():
        y = x.exp()
        z = y.square()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified in place after the forward pass"):
        z.sum().backward()


def test_storage_is_not_mistaken_for_a_dead_one(x):
    """Freed outputs whose memory is used again must not be found under the old address."""
    with recompute.scope():
        for i in range(50):
            dead = x * 3
            recompute.offer(dead, lambda t: t * float("nan"), x)
            del dead
            y = (x + i).square()
            assert gradient(y, x).isfinite().all()


def test_checkpointing_inside_a_scope_keeps_its_own_rules(doubler, x):
    with recompute.scope():
        y = checkpoint(lambda t: doubler(t).square(), x, use_reentrant=False)
    assert torch.equal(gradient(y, x), 8 * x)
    assert doubler.rebuilt == 0


def test_rebuilding_ignores_autocast_around_backward(x):
    conv = nn.Conv2d(2, 2, 3, padding=1)
    image = torch.randn(1, 2, 5, 5, requires_grad=True)

    def blur(t):
        return F.conv2d(t, torch.ones(2, 1, 3, 3), padding=1, groups=2)

    def run(autocast):
        image.grad = None
        with recompute.scope():
            hidden = blur(image)
            recompute.offer(hidden, blur, image)
            y = conv(hidden)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y.square().sum().backward()
        return image.grad

    assert run(autocast=True).dtype is torch.float32
    torch.testing.assert_close(run(autocast=True), run(autocast=False), rtol=2e-2, atol=0.5)


def test_the_stem_keeps_the_bytes_alone():
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8, device=DEVICE)
    weight = torch.randn(5, 48, 1, 1, device=DEVICE, requires_grad=True)
    gradients, dead = [], []
    for active in (True, False):
        with recompute.scope(active):
            y = stem_input(images, 4, torch.float32, impl="triton")
            z = F.conv2d(y, weight)
        storage = StorageWeakRef(y.untyped_storage())
        del y
        gc.collect()  # Triton's interpreter leaves cycles
        dead.append(storage.expired())
        gradients.append(gradient(z.square(), weight))
    assert dead == [True, False]
    assert torch.equal(*gradients)


def test_threads_do_not_share_a_scope(doubler, x):
    import threading

    results = []
    with recompute.scope():
        thread = threading.Thread(target=lambda: results.append(doubler(x).square()))
        thread.start()
        thread.join()
    gradient(results[0], x)
    assert doubler.rebuilt == 0


def test_an_input_of_a_rebuilt_tensor_changed_in_place_is_an_error():
    x = torch.randn(1, 2, 6, 6, requires_grad=True)
    weight = torch.randn(3, 2, 3, 3, requires_grad=True)
    with recompute.scope():
        source = x * 2
        y = F.conv2d(blur_pool(source), weight)
    source.relu_()
    with pytest.raises(RuntimeError, match="modified in place after the forward pass"):
        y.sum().backward()
