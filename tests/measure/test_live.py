"""The peak of live tensors: known sums, with and without computing."""

import torch
from torch import nn

from tresnet.measure.live import LivePeak, training_peak
from tresnet.measure.macs import without_computing

MIB = 2**20


def work() -> torch.Tensor:
    """Two MiB at once, then three, then one."""
    a = torch.zeros(MIB // 4)
    b = a + 1
    c = a + b
    del a, b
    return c.view(-1)


def test_the_peak_is_what_lived_at_once():
    with LivePeak() as peak:
        result = work()
    assert peak.peak_bytes == 3 * MIB
    assert peak.live_bytes == MIB
    del result
    assert peak.live_bytes == 0


def test_the_count_is_the_same_without_computing():
    with without_computing(), LivePeak() as peak:
        result = work()
        assert peak.live_bytes == MIB
    assert peak.peak_bytes == 3 * MIB
    del result


def test_a_training_step_counts_weights_gradients_and_what_backward_keeps():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))

    unit = 256 * 256 * 4
    # weights 2, input 1, hidden 1, output 1 stay; at the end of backward: both weights' gradients,
    # and nothing else: the output's gradient is an expanded scalar made contiguous for a product
    peak = training_peak(build, (256, 256))
    assert 6 * unit <= peak <= 8 * unit + 4096
