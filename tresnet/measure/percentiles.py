"""From the times of single steps to images per second."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tresnet.errors import InputError


@dataclasses.dataclass(frozen=True)
class Speed:
    """Percentiles of a series of steps.

    p20 images/s is exceeded by 80 % of the steps, p80 by 20 %: p20 <= p50 <= p80. They are
    batch size / percentile of the step times, so p20 images/s belongs to the 80th percentile of
    time.
    """

    p20_images_per_s: float
    p50_images_per_s: float
    p80_images_per_s: float
    p50_step_time_ms: float


def speed_of(step_times_s: Sequence[float], batch_size: int) -> Speed:
    """Percentiles of images/s over steps of `batch_size` images each.

    Times between two measured ones are interpolated linearly.

    Raises:
        InputError: no step, or a time that is not positive.
    """
    if not step_times_s or min(step_times_s) <= 0:
        raise InputError("expected at least one step time, all above 0 s")
    p20_s, p50_s, p80_s = (float(value) for value in np.percentile(step_times_s, (20, 50, 80)))
    return Speed(
        p20_images_per_s=batch_size / p80_s,
        p50_images_per_s=batch_size / p50_s,
        p80_images_per_s=batch_size / p20_s,
        p50_step_time_ms=p50_s * 1000,
    )
