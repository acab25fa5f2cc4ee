"""Recurrent layers and models that take no images, counted by hand."""

import pytest
import torch
from torch import nn

from tresnet.errors import InputError
from tresnet.memory import Category, predict
from tresnet.memory.recurrent import reserve_bytes

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="a torch without CUDA has no cuDNN to predict"
)
BATCH, LENGTH, FEATURES, HIDDEN = 8, 20, 256, 512
GATES = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}


class Sequences(nn.Module):
    """A recurrent layer, of which the last output is what the model returns."""

    def __init__(self, layer: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.layer = layer(FEATURES, HIDDEN, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def sequences(layer, options=None, **step):
    settings = {"batch_size": BATCH, "inputs": ((LENGTH, FEATURES), torch.float32), "amp": "off"}
    if step.get("train", True):
        settings["opt"] = sgd
    return predict(Sequences(layer, **options or {}), **{**settings, **step})


def born(prediction, operation, step=2):
    """Bytes of the buffers that an operation made in a step, largest first."""
    trace = prediction.trace
    makers = ((b.n_bytes, trace.operations[b.op]) for b in trace.buffers)
    made = [n_bytes for n_bytes, one in makers if (one.name, one.step) == (operation, step)]
    return sorted(made, reverse=True)


@pytest.mark.parametrize(
    ("layer", "n_bytes"), [(nn.LSTM, 736_000_000), (nn.GRU, 864_000_000)], ids=["lstm", "gru"]
)
def test_reserve_space_is_what_the_formula_was_derived_from(layer, n_bytes):
    """PyTorch's issue 2895: four layers of 320 units in fp32, and 25,000 steps as we take it."""
    mode = torch.backends.cudnn.rnn.get_cudnn_mode(layer.__name__)
    assert reserve_bytes(mode, 25_000, 320, 4, itemsize=4) == n_bytes


@pytest.mark.parametrize(("layer", "kept"), [(nn.RNN, 2), (nn.LSTM, 5), (nn.GRU, 6)])
def test_a_layer_keeps_its_output_and_its_reserve_space(layer, kept):
    """Not a tensor for each step, as PyTorch's own kernels would."""
    prediction = sequences(layer)
    state = 4 * BATCH * LENGTH * HIDDEN
    weights = 4 * GATES[layer] * HIDDEN * (FEATURES + HIDDEN + 2)
    copy = 4 * BATCH * LENGTH * FEATURES  # the batch lies first in the input
    states = [4 * BATCH * HIDDEN] * (2 if layer is nn.LSTM else 1)
    workspace = weights + copy
    forward = sorted([kept * state, state, workspace, *states], reverse=True)
    assert [n for n in born(prediction, "aten._cudnn_rnn") if n] == forward
    backward = born(prediction, "aten._cudnn_rnn_backward")
    assert backward == sorted([weights, workspace + state, copy, *states], reverse=True)
    assert "derived from two readings" in str(prediction)
    names = {operation.name for operation in prediction.trace.operations}
    assert names.isdisjoint({"aten.mm", "aten.addmm"})


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("layer", GATES)
def test_weights_are_counted_once(layer, amp):
    """Views into one buffer on a GPU, and under autocast a copy in half precision."""
    prediction = sequences(layer, {"num_layers": 2, "bidirectional": True}, amp=amp)
    n = 2 * GATES[layer] * HIDDEN * (FEATURES + HIDDEN + 2)
    n += 2 * GATES[layer] * HIDDEN * (2 * HIDDEN + HIDDEN + 2)
    held = [b for b in prediction.trace.buffers if b.category is Category.PARAMETERS]
    assert held[-1].n_bytes == 4 * n  # the first are those before they were made one
    assert (2 * n in born(prediction, "aten._cudnn_rnn") + born(prediction, "aten.new_empty")) is (
        amp != "off"
    )
    gradients = sum(
        b.n_bytes
        for b in prediction.trace.buffers
        if b.category is Category.GRADIENTS and prediction.trace.operations[b.op].step == 2
    )
    assert gradients == 4 * n


def test_inference_keeps_nothing_for_backward():
    n_bytes = 4 * BATCH * LENGTH * HIDDEN
    made = born(sequences(nn.LSTM, train=False), "aten._cudnn_rnn")
    workspace = 4 * (4 * HIDDEN * (FEATURES + HIDDEN + 2) + BATCH * LENGTH * FEATURES)
    assert made[:2] == [workspace, n_bytes]
    assert 0 in made  # where the reserve space would be


def test_projections_of_both_directions_are_the_output():
    prediction = sequences(nn.LSTM, {"proj_size": 64, "bidirectional": True})
    assert 2 * 4 * BATCH * LENGTH * 64 in born(prediction, "aten._cudnn_rnn")


class Tokens(nn.Module):
    """A transformer over tokens, with a mask by name."""

    def __init__(self, n_tokens: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, n_tokens)

    def forward(self, tokens, mask=None):
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=mask))


TOKENS = ((128,), torch.int64)
MASK = ((128,), torch.bool)


@pytest.mark.parametrize(
    ("inputs", "step"),
    [
        (TOKENS, {}),
        (torch.zeros(3, 128, dtype=torch.int64), {"amp": "bf16"}),
        ([TOKENS, MASK], {"train": False, "dtype": "bf16"}),
        ({"tokens": TOKENS, "mask": torch.zeros(1, 128, dtype=torch.bool)}, {}),
    ],
    ids=["shape", "example", "list", "dict"],
)
def test_models_of_tokens_are_predicted(inputs, step):
    prediction = predict(Tokens(), batch_size=4, inputs=inputs, **step)
    several = isinstance(inputs, list | dict)
    size = 4 * 128 * 8 + (4 * 128 if several else 0)
    given = [b.n_bytes for b in prediction.trace.buffers if b.category is Category.INPUT]
    assert sum(given) == 2 * (size + (4 * 8 if prediction.plan.train else 0))
    wanted = "128 int64 and 128 bool" if several else "128 int64"
    assert f"batch 4 of {wanted}, " in str(prediction)
    logits = (4, 128, 1000)
    assert any(logits in one.shapes for one in prediction.trace.operations)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(1, 3), "expected inputs or input_size, got both: inputs have their own"),
        *(
            (inputs, r"inputs: expected for each argument of the model an example tensor.*got")
            for inputs in (
                3, [], [3], torch.tensor(1), [((0,), torch.int64)], {"tokens": (128, int)},
            )
        ),
        ([TOKENS, ((5,), torch.bool)], "of 2 of 128 int64 and 5 bool at .*: check inputs and the"),
        ({"token": TOKENS}, "unexpected keyword argument 'token'.*: check inputs and the model"),
        (None, "of 3x224x224 at .*one that takes no images needs inputs$"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_explained(inputs, message):
    with pytest.raises(InputError, match=message):
        predict(Tokens, batch_size=2, inputs=inputs, input_size=32 if "both" in message else None)
