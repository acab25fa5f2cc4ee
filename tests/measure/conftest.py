import functools
import json

import pytest
import torch

from tresnet import env
from tresnet.measure import runner


@pytest.fixture
def cuda_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


about = functools.cache(env.describe)


@pytest.fixture
def quick(monkeypatch):
    """Skip garbage collection and git, which take longer than the measurement."""
    said = json.dumps(about())
    monkeypatch.setattr(env, "describe", lambda device: json.loads(said))
    monkeypatch.setattr(runner.gc, "collect", int)
