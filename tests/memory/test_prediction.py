"""Predictions of models small enough to count by hand, and what they say to bad input."""

import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.toys import mean, sgd
from tresnet.memory import Category, Phase, predict
from tresnet.memory.allocator import round_request
from tresnet.memory.attention import _as_bias, attend
from tresnet.memory.device import MIB
from tresnet.memory.plan import make_plan, plan_of
from tresnet.memory.replay import peak_live_bytes
from tresnet.ops.launching import recorded_launches
from tresnet.peers import build_named
from tresnet.surgery import fold

WIDTH = 1024
WEIGHT_BYTES = 4 * WIDTH * WIDTH
BIAS_BYTES = round_request(4 * WIDTH)
LAYERS = 3
GOLDEN = Path(__file__).parents[1] / "golden" / "memory.json"
CONTIGUOUS_FP32 = {"amp": "off", "channels_last": False}
PINNED = [
    ("tresnet_t", {"batch_size": 16, **CONTIGUOUS_FP32}),
    (
        "tresnet_t",
        {"batch_size": 16, "amp": "fp16", "ema_decay": 0.99, "clip_grad": 1.0}
        | {"channels_last": False},
    ),
    ("tresnet_m", {"batch_size": 256, "input": "uint8"}),
    ("tresnet_m", {"batch_size": 256, "recompute": "none", "ddp": True, "channels_last": False}),
    ("tresnet_m", {"batch_size": 64, "train": False, "dtype": "bf16"}),
    ("timm:resnet50", {"batch_size": 64, "opt": "adamw", "accumulate": 2, **CONTIGUOUS_FP32}),
    (
        "timm:vit_tiny_patch16_224",
        {"batch_size": 16, "grad_checkpointing": True, "channels_last": False},
    ),
]


def mlp():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def test_two_threads_leave_torch_as_it_was():
    """The first sits in its replaced torch until the second has begun."""
    before, begun = torch.autograd.backward, threading.Event()

    def loss(output, target):
        begun.wait(0.2)  # while the other thread would replace torch too
        begun.set()
        return output.mean()

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: vectors.__wrapped__(loss=loss), range(2)))
    assert torch.autograd.backward is before
    assert both[0].allocated == both[1].allocated == vectors().allocated


def at_most(prediction, category, phases=tuple(Phase)):
    """The most a category ever holds, during these phases."""
    trace, held, most = prediction.trace, 0, 0
    for event in trace.events:
        buffer = trace.buffers[event.buffer]
        if buffer.category is category:
            held += buffer.n_bytes if event.allocates else -buffer.n_bytes
        if trace.operations[event.op].phase in phases:
            most = max(most, held)
    return most


class Vectors(nn.Module):
    """An MLP that takes vectors as (N, 1, WIDTH, 1)."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x.flatten(1))


@functools.cache
def vectors(**step):
    settings = {"batch_size": 16, "input_size": (1, WIDTH, 1), "loss": mean, "opt": sgd}
    return predict(Vectors, **{**settings, **step})


PARAMETERS = LAYERS * (WEIGHT_BYTES + 4 * WIDTH)


@pytest.mark.parametrize(
    ("step", "category", "phases", "n_bytes"),
    [
        ({}, Category.PARAMETERS, Phase, PARAMETERS),
        ({}, Category.GRADIENTS, Phase, PARAMETERS),
        ({}, Category.GRADIENTS, [Phase.FORWARD], 0),
        ({"accumulate": 2}, Category.GRADIENTS, [Phase.FORWARD], PARAMETERS),
        *(
            ({"opt": opt}, Category.OPTIMIZER, Phase, pytest.approx(n * PARAMETERS, rel=1e-4))
            for opt, n in (
                *((sgd, 0), ("sgd", 1), ("adamw", 2), (torch.optim.RMSprop, 1), ("lamb", 2)),
                (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
            )
        ),
        # the foreach SGD of a GPU adds decay into new tensors
        ({"opt": lambda p: sgd(p, weight_decay=1e-4)}, Category.TEMPORARY, Phase, PARAMETERS),
        (
            *({"amp": "bf16"}, Category.CAST_WEIGHTS, Phase),
            # biases are cast too, but not saved for backward; the input needs no gradient
            pytest.approx((LAYERS - 1) * WEIGHT_BYTES / 2, rel=1e-3),
        ),
        ({"device": "a100"}, Category.WORKSPACE, Phase, 2 * 8_519_680),
        ({"device": "h100"}, Category.WORKSPACE, Phase, 2 * 32 * MIB),
    ],
)
def test_options_change_what_is_held(step, category, phases, n_bytes):
    assert at_most(vectors(**step), category, phases) == n_bytes


@pytest.mark.parametrize(("step", "n_bytes"), [({}, 4), ({"input": "uint8"}, 1)])
def test_a_batch_of_bytes_takes_a_quarter(step, n_bytes):
    prediction = predict("tresnet_t", batch_size=4, **step)
    assert at_most(prediction, Category.INPUT) == 4 * (n_bytes * 3 * 32 * 32 + 8)
    assert ("uint8 input" in str(prediction)) == (n_bytes == 1)


def test_ema_copies_parameters_and_buffers():
    model = build_named("tresnet_t", device="meta")
    state = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    prediction = predict("tresnet_t", batch_size=4, ema_decay=0.99)
    assert at_most(prediction, Category.EMA) == state
    assert prediction.peak_operation.module.startswith("body.")


def test_gradients_live_in_ddps_buckets():
    prediction = vectors(ddp=True, cuda_graph="off")
    held = at_most(prediction, Category.BUCKETS) + at_most(prediction, Category.GRADIENTS)
    assert at_most(vectors(), Category.GRADIENTS) == PARAMETERS
    assert held < 3 * PARAMETERS
    assert prediction.end_allocated_bytes >= vectors().end_allocated_bytes + PARAMETERS


def test_gradients_are_copied_to_flat_memory_beside_graphs():
    prediction = vectors(ddp=True, accumulate=2)
    assert at_most(prediction, Category.BUCKETS) == PARAMETERS
    assert at_most(prediction, Category.GRADIENTS) == PARAMETERS
    assert prediction.end_allocated_bytes == vectors(accumulate=2).end_allocated_bytes + PARAMETERS


@pytest.mark.parametrize(
    ("model", "module"),
    [("tresnet_t", "body.layer4.0.conv1.conv"), ("timm:test_resnet", "layer1.0.conv1")],
)
def test_checkpointing_keeps_less_and_recomputes_in_mixed_precision(model, module):
    """torch.utils.checkpoint enters autocast of its own, which must stay on without a GPU."""
    step = {"batch_size": 4, "input_size": 64, "amp": "bf16"}
    full, less = (predict(model, **step, grad_checkpointing=on) for on in (False, True))
    assert less.by_category[Category.ACTIVATIONS] < full.by_category[Category.ACTIVATIONS]
    casts = {
        o.phase
        for o in less.trace.operations
        if o.step == 2
        and (o.name == "aten._foreach_copy_" or (o.name == "aten._to_copy" and o.module == module))
    }
    assert casts >= {Phase.FORWARD, Phase.BACKWARD}


def test_ranges_of_reserved_memory_and_of_the_context():
    prediction = vectors()
    allocated, reserved = prediction.allocated, prediction.reserved
    assert reserved.low_bytes == min(allocated.low_bytes, reserved.expected_bytes)
    more = allocated.high_bytes - allocated.expected_bytes
    fragmented = int(1.1 * reserved.expected_bytes)
    assert reserved.high_bytes == max(fragmented, reserved.expected_bytes + more)
    for bound, context in (("low", 300), ("expected", 600), ("high", 1500)):
        total, held = (getattr(r, f"{bound}_bytes") for r in (prediction.device_total, reserved))
        assert total - held == context * MIB


def test_model_is_left_alone_and_tied_weights_are_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.b = nn.Linear(WIDTH, WIDTH)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.norm(x.flatten(1))))

    model = Tied().eval()
    before = {k: (t, t.clone(), t._version) for k, t in model.state_dict(keep_vars=True).items()}
    step = {"batch_size": 2, "input_size": (1, WIDTH, 1), "target_size": (WIDTH,)}
    prediction = predict(model, opt="adamw", ema_decay=0.9, **step)
    assert at_most(prediction, Category.PARAMETERS) == WEIGHT_BYTES + 4 * BIAS_BYTES
    for key, tensor in model.state_dict(keep_vars=True).items():
        same, values, version = before[key]
        assert tensor is same
        assert torch.equal(tensor, values)
        assert (tensor.device.type, tensor._version, tensor.grad) == ("cpu", version, None)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not model.training
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("train", [True, False])
def test_several_outputs_are_predicted(train):
    class Two(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            return {"out": y, "aux": [y.mean((2, 3))]}

    prediction = predict(Two(3, 4, 1), batch_size=2, input_size=8, train=train)
    # The last step's outputs, and its loss, are alive while the next batch arrives.
    held = at_most(prediction, Category.ACTIVATIONS, [Phase.INPUT])
    assert held == 4 * 2 * 4 * (8 * 8 + 1) + 4 * train


@pytest.mark.parametrize(
    ("amp", "masked", "size", "keeps_matrix"),
    [
        *(("off", False, 8, False), ("off", False, 6, True)),
        *(("bf16", True, 8, False), ("bf16", True, 12, True), ("bf16", False, 6, False)),
    ],
)
def test_attention_keeps_its_matrix_where_no_kernel_takes_the_heads(
    amp, masked, size, keeps_matrix
):
    """The efficient kernel reads rows of 16 bytes; the flash kernel has them padded."""
    length, heads = 256, 4

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Conv2d(3, 3 * heads * size, 1)

        def forward(self, x):
            q, k, v = self.qkv(x).view(1, 3, heads, size, length).transpose(3, 4).unbind(1)
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device)
            return nn.functional.scaled_dot_product_attention(q, k, v, mask if masked else None)

    p = predict(Attention(), batch_size=1, input_size=16, amp=amp, loss=mean)
    matrix = heads * length * length * (4 if amp == "off" else 2)
    assert (at_most(p, Category.ACTIVATIONS) > matrix) is keeps_matrix


def test_attention_kernels_get_padded_rows():
    q = torch.empty(1, 4, 16, 6, dtype=torch.bfloat16, device="meta")
    out, mask = attend(q, q, q), torch.ones(16, 20, dtype=torch.bool)
    assert (out.shape, out.untyped_storage().nbytes()) == (q.shape, 2 * 4 * 16 * 8)
    assert _as_bias(mask, q, q.new_empty(1, 4, 20, 6)).stride()[-2] == 32


def test_attention_runs_the_same_kernel_in_inference():
    class Attention(nn.MultiheadAttention):
        def forward(self, x):
            x = x.flatten(2)
            return super().forward(x, x, x, need_weights=False)[0]

    step = {"batch_size": 1, "input_size": (16, 32, 1)}
    for more in ({"amp": "bf16"}, {"train": False, "dtype": "bf16"}):
        prediction = predict(Attention(32, 4, batch_first=True), **step, **more)
        names = {operation.name for operation in prediction.trace.operations}
        assert "aten._scaled_dot_product_flash_attention" in names


def test_folded_inference_holds_no_activation_of_a_norm():
    step = {"batch_size": 256, "amp": "bf16", "train": False}
    with recorded_launches() as launches:  # it keeps their tensors
        predict("tresnet_t", fold=True, **step)
    folded = predict("tresnet_t", fold=True, **step)
    plain = predict("tresnet_t", fold=False, **step)
    assert "folded" in str(folded)
    model = fold(build_named("tresnet_t", device="meta").eval())
    before = predict(model, **step)
    assert "folded" not in str(before), "by the step"
    assert before.allocated.expected_bytes <= folded.allocated.expected_bytes
    for category in (Category.GRADIENTS, Category.ACTIVATION_GRADIENTS):
        assert at_most(folded, category) == 0
    # the kernels that a GPU runs behind each convolution
    assert {"apply", "apply_blurred", "squeeze"} <= {one.kernel.__name__ for one in launches}
    # of tensors: the allocator's splits differ, as folding leaves cached blocks of other sizes
    assert peak_live_bytes(folded.trace) <= peak_live_bytes(plain.trace)


def golden(pinned=PINNED):
    """Return what the golden file should hold, in bytes."""
    numbers = {}
    for name, settings in pinned:
        p = predict(name, device="a100", **settings)
        assert sum(p.by_category.values()) == p.allocated.expected_bytes
        assert p.allocated.low_bytes <= p.allocated.expected_bytes <= p.allocated.high_bytes
        assert p.allocated.expected_bytes <= p.reserved.expected_bytes
        numbers[f"{name} {json.dumps(settings)}"] = [
            p.allocated.expected_bytes,
            p.allocated.high_bytes,
            p.reserved.expected_bytes,
            p.end_allocated_bytes,
        ]
    return numbers


def test_a_plan_is_described_by_the_settings_that_differ():
    step = {"accumulate": 2, "ema_decay": 0.9, "amp": "bf16", "channels_last": False}
    _, _, train = make_plan("tresnet_t", plan_of("predict", 8, step))
    assert train.describe() == (
        "train, batch 8 of 3x32x32, bf16 autocast, sgd, accumulate 2, ema_decay"
    )
    _, _, infer = make_plan("tresnet_t", plan_of("predict", 8, {"train": False, "dtype": "fp16"}))
    assert infer.describe() == "inference, batch 8 of 3x32x32, fp16, channels_last, folded"


def test_an_old_gpu_runs_plain_modules():
    """The GPU that is named decides, and not the machine's."""
    model = build_named("tresnet_t", device="meta")
    step = {"batch_size": 16, "input_size": 128, "amp": "fp16"}
    plain, old, recent = (
        predict(model, device="v100", **step),
        predict("tresnet_t", device="v100", impl="plain", **step),
        predict(model, device="a100", **step),
    )
    assert plain.allocated == old.allocated
    assert recent.allocated.expected_bytes < 0.8 * plain.allocated.expected_bytes


@pytest.mark.parametrize("pinned", [PINNED[:3], pytest.param(PINNED[3:], marks=pytest.mark.slow)])
def test_golden(pinned):
    """Compare with the golden file, which `python -m tests.golden memory` writes anew."""
    written = json.loads(GOLDEN.read_text())
    assert len(written) == len(PINNED)
    assert golden(pinned).items() <= written.items()
