import pytest
import torch

from tresnet.measure.throughput import ThroughputMeter


class FakeClock:
    """Time set by hand; `finished_s` is how far a device behind the host has come."""

    def __init__(self):
        self.now_s = 100.0
        self.finished_s = float("inf")
        self.waited = 0

    def mark(self):
        return self.now_s

    def reached(self, mark):
        return mark <= self.finished_s

    def wait(self, mark):
        if not self.reached(mark):
            self.waited += 1
            self.finished_s = mark

    def seconds(self, begin, end):
        assert self.reached(end), "read before the device came there"
        return end - begin


def run_steps(meter, clock, count, wait_s=0.0, work_s=1.0, images=8):
    for _ in range(count):
        clock.now_s += wait_s
        meter.data_ready()
        clock.now_s += work_s
        meter.step(images)


def make(window=50):
    clock = FakeClock()
    return ThroughputMeter("cpu", window=window, clock=clock), clock


def test_nothing_measured_is_none_not_zero():
    meter, clock = make()
    assert meter.images_per_s() is None
    assert meter.mean_images_per_s() is None
    assert meter.data_wait_fraction() is None
    meter.start()
    assert meter.images_per_s() is None
    run_steps(meter, clock, 3)
    meter.reset()
    assert meter.mean_images_per_s() is None
    run_steps(meter, clock, 1, work_s=1000)  # without a start the first step is not counted
    assert meter.images_per_s() is None
    run_steps(meter, clock, 2, work_s=2)
    assert meter.images_per_s() == pytest.approx(4)


@pytest.mark.parametrize(
    ("window", "steps", "recent", "mean", "without_wait", "wait"),
    [
        (3, [(5, 0, 4), (1, 0, 2), (2, 0, 1)], 6, 8 * 8 / 24, 8 * 8 / 24, 0),
        (2, [(4, 3, 1)], 2, 2, 8, 0.75),
    ],
)
def test_the_window_is_recent_and_the_mean_is_over_all(
    window, steps, recent, mean, without_wait, wait
):
    meter, clock = make(window)
    meter.start()
    for count, wait_s, work_s in steps:
        run_steps(meter, clock, count, wait_s, work_s)
    for _ in range(2):  # reading changes nothing
        assert meter.images_per_s() == pytest.approx(recent)
        assert meter.data_wait_fraction() == pytest.approx(wait)
        assert meter.mean_images_per_s() == pytest.approx(mean)
        assert meter.mean_images_per_s(exclude_data_wait=True) == pytest.approx(without_wait)


def test_start_leaves_out_a_pause_and_batches_are_weighted_by_time():
    meter, clock = make()
    meter.start()
    run_steps(meter, clock, 1, work_s=1, images=10)
    clock.now_s += 1000
    meter.start()
    run_steps(meter, clock, 1, work_s=3, images=2)
    assert meter.images_per_s() == pytest.approx(3)


def test_reading_never_waits_for_a_device_that_lags():
    meter, clock = make()
    meter.start()
    clock.finished_s = 102.0
    run_steps(meter, clock, 4)
    assert meter.images_per_s() == pytest.approx(8)  # two of four steps are done
    assert clock.waited == 0
    assert meter.mean_images_per_s() == pytest.approx(8)
    assert clock.waited == 1  # once, for the last


@pytest.mark.gpu
def test_cuda_rate_matches_events_and_does_not_synchronise(cuda_device):
    meter = ThroughputMeter(cuda_device)
    block = torch.randn(4096, 4096, device=cuda_device)
    block @ block
    torch.cuda.synchronize()
    meter.start()
    torch.cuda._sleep(2_000_000_000)
    meter.step(8)
    assert meter.images_per_s() is None  # about a second of sleep is still running
    assert meter.mean_images_per_s() > 0
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    meter.reset()
    meter.start()
    begin.record()
    for _ in range(10):
        block @ block
        meter.step(8)
    end.record()
    torch.cuda.synchronize()
    expected = 80 / (begin.elapsed_time(end) / 1000)
    assert meter.mean_images_per_s() == pytest.approx(expected, rel=0.5)
