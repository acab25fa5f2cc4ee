import functools
import json

import pytest
import torch

from tresnet import environment
from tresnet.measure import runner


@pytest.fixture
def cuda_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


about = functools.cache(environment.describe)


@pytest.fixture
def quick(monkeypatch):
    """Skip garbage collection and git, which take longer than the measurement."""
    said = json.dumps(about())
    monkeypatch.setattr(environment, "describe", lambda device: json.loads(said))
    monkeypatch.setattr(runner.gc, "collect", int)
