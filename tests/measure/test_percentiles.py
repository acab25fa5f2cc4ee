import numpy as np
import pytest

from tresnet.errors import InputError
from tresnet.measure.percentiles import speed_of


def test_known_times():
    """Times 1..11 s: percentiles of time are exactly 3, 6 and 9 s."""
    speed = speed_of([float(second) for second in range(1, 12)], batch_size=36)
    assert speed.p20_images_per_s == pytest.approx(36 / 9)
    assert speed.p50_images_per_s == pytest.approx(36 / 6)
    assert speed.p80_images_per_s == pytest.approx(36 / 3)
    assert speed.p50_step_time_ms == pytest.approx(6000)


def test_order_of_steps_does_not_matter_and_slow_is_p20():
    times_s = np.random.default_rng(0).uniform(0.1, 1, 50).tolist()
    speed = speed_of(times_s, 8)
    assert speed == speed_of(sorted(times_s), 8)
    assert speed.p20_images_per_s < speed.p50_images_per_s < speed.p80_images_per_s
    slower = sum(8 / time_s < speed.p20_images_per_s for time_s in times_s)
    assert slower == 10


def test_one_outlier_does_not_move_the_median():
    assert speed_of([1.0] * 20 + [100.0], 8).p50_images_per_s == pytest.approx(8)


@pytest.mark.parametrize("times_s", [[], [1.0, 0.0]])
def test_nothing_to_measure(times_s):
    with pytest.raises(InputError, match="at least one step time, all above 0"):
        speed_of(times_s, 8)
