"""Calls of PyTorch's functions, in their order, on stand-ins."""

from unittest.mock import MagicMock, call

import pytest
import torch

from tresnet.steps import capturer


@pytest.fixture
def cuda(monkeypatch):
    """Stand-ins of PyTorch's parts, which record their calls."""
    cuda = MagicMock()
    cuda.Stream.return_value.device = torch.device("cuda", 3)
    cuda.default_generators = {3: cuda.generator}
    cuda.graph.return_value.__exit__.return_value = None
    names = ("Stream", "Event", "CUDAGraph", "graph_pool_handle", "default_generators")
    names += ("get_rng_state", "set_rng_state")
    for name in (*names, "stream", "current_stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end, raising=False)
    return cuda


def test_a_failed_capture_leaves_stream_generator_and_pool_as_before(cuda):
    cuda.graph.return_value.__exit__.side_effect = RuntimeError("capture was invalidated")
    cuda.end.side_effect = RuntimeError("not recording to this pool")
    made = capturer.CudaCapturer(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="capture was invalidated"):
        made.capture(lambda: None)
    before = cuda.generator.clone_state.return_value
    cuda.generator.graphsafe_set_state.assert_called_once_with(before)
    cuda.end.assert_called_once_with(3, cuda.graph_pool_handle.return_value)
    cuda.stream.assert_called_once_with(cuda.current_stream.return_value)
    assert cuda.stream.return_value.__exit__.called


def test_captures_and_replays_are_in_order_with_the_callers_stream(cuda):
    made = capturer.CudaCapturer(torch.device("cuda"))
    assert made.capture(lambda: "outputs") == ("outputs", cuda.CUDAGraph.return_value.replay)
    cuda.reset_mock()
    with made.serialized(), made.on_capture_stream():
        cuda.work()
    current, own, used = (getattr(call, name)() for name in ("current_stream", "Stream", "Event"))
    stream = call.stream(cuda.Stream())
    assert [c for c in cuda.mock_calls if c[0] not in ("current_stream", "Stream")] == [
        current.wait_event(cuda.Event()), own.wait_stream(cuda.current_stream()), stream,
        stream.__enter__(), call.work(), stream.__exit__(None, None, None),
        current.wait_stream(cuda.Stream()), used.record(cuda.current_stream()),
    ]  # fmt: skip


def test_random_numbers_repeat_after_their_state_is_restored(cuda):
    made = capturer.CudaCapturer(torch.device("cuda"))
    restore, drawn = made.random_state(), torch.rand(2)
    restore()
    assert torch.equal(torch.rand(2), drawn)
    device = cuda.Stream.return_value.device
    cuda.get_rng_state.assert_called_once_with(device)
    cuda.set_rng_state.assert_called_once_with(cuda.get_rng_state.return_value, device)
