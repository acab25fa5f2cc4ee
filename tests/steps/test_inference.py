"""Conversion, compilation and CUDA graphs of an inference step."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.steps.stand_in import CPU, StandIn, network, small
from tresnet.errors import InputError
from tresnet.settings import InferenceCompute
from tresnet.steps import InferenceStep
from tresnet.steps import inference as steps
from tresnet.steps.graph import WARMUP_RUNS


def test_complex_numbers_are_not_made_real():
    model = nn.Conv2d(3, 1, 1)
    model.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
    with pytest.raises(InputError, match=r"got torch.complex64 in phase"):
        InferenceStep(model, InferenceCompute(fold=False), CPU)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_smaller_last_batch_is_no_other_size_to_a_compiled_model(monkeypatch, channels_last):
    shapes, model = [], nn.Conv2d(3, 1, 1)

    def compiled(module, mode, *, training, **_):
        assert (mode, training) == ("default", False)
        return lambda x: shapes.append((x.shape, x.stride())) or module(x)

    monkeypatch.setattr(steps, "compile_model", compiled)
    compute = InferenceCompute(compile="default", channels_last=channels_last, fold=False)
    step = InferenceStep(model, compute, CPU)
    for count in (3, 2, 1):
        images = step.feed(torch.rand(count, 3, 4, 5), torch.zeros(count))[0]
        torch.testing.assert_close(step(images), model(images))
    assert len(set(shapes)) == 1


def inference(capturer=None, model=None, **compute):
    step = InferenceStep(model or network(), InferenceCompute(fold=False, **compute), CPU)
    said = []
    if capturer is not None:
        step.capture_with(capturer(step.model), said.append)
    return step, said


@pytest.mark.parametrize("compute", [{}, {"dtype": "bf16"}, {"amp": "bf16"}], ids=str)
def test_inference_by_graphs_gives_the_eager_logits(compute):
    """Expect one graph for all batches of 4, and an eager run of the batch of 3 among them."""
    (graphed, said), (eager, _) = inference(StandIn, **compute), inference(**compute)
    outputs, expected, replayed = [], [], []
    for number in range(14):
        images = torch.rand(3 if number == 9 else 4, 3, 8, 8)
        if number % 2:
            images = images.contiguous(memory_format=torch.channels_last)
        outputs.append(graphed(graphed.feed.images(images)))
        expected.append(eager(eager.feed.images(images)))
        replayed.append(graphed.replayed)
    assert all(map(torch.equal, outputs, expected))
    assert said == ["batches of 4 run as a CUDA graph"], "the feed gives all one layout"
    assert graphed._graphs._capturer.warmups == 0, "the results belong to the caller's stream"
    assert replayed == [False] * 3 + [True] * 6 + [False] + [True] * 4


def test_threads_use_a_graph_one_at_a_time():
    graphed, _ = inference(StandIn)
    batches = [torch.full((4, 3, 8, 8), value / 8) for value in range(8)]
    expected = [inference()[0](images) for images in batches]
    together = threading.Barrier(8)

    def work(images):
        together.wait()
        return [graphed(images) for _ in range(6)]

    with ThreadPoolExecutor(8) as threads:
        for outputs, value in zip(threads.map(work, batches), expected, strict=True):
            assert all(torch.equal(output, value) for output in outputs)


def test_no_more_graphs_than_memory_is_meant_for():
    graphed, said = inference(StandIn)
    for size in range(1, 12):
        for _ in range(5):
            graphed(torch.rand(size, 3, 8, 8))
    assert said[:-1] == [f"batches of {size} run as a CUDA graph" for size in range(1, 9)]
    assert said[-1].startswith("8 CUDA graphs were captured, which is the limit: other shapes")


def test_a_scripted_model_is_replayed():
    model = torch.jit.script(network().eval())
    step, _ = inference(StandIn, model)
    setting_up, replayed = [], []
    for _ in range(7):
        images = torch.rand(4, 3, 8, 8)
        torch.testing.assert_close(step(images), model(images))
        setting_up.append(step.setting_up)
        replayed.append(step.replayed)
    assert replayed == [False] * WARMUP_RUNS + [True] * 4
    assert setting_up == [False] * WARMUP_RUNS + [True] + [False] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["plain", "triton"])
def test_a_gpu_replays_inference(impl):
    device = torch.device("cuda", 0)
    model = small(impl)
    steps_of = [
        InferenceStep(copy.deepcopy(model), InferenceCompute(cuda_graph=way), device)
        for way in ("on", "off")
    ]
    for number in range(8):
        images = torch.rand(2, 3, 64, 64)
        logits, expected = (step(step.feed.images(images)) for step in steps_of)
        torch.testing.assert_close(logits, expected)
        assert steps_of[0].replayed == (number >= WARMUP_RUNS)
