import json

import pytest
import torch

from tresnet import env
from tresnet.measure import runner


@pytest.fixture
def cuda_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def quick(monkeypatch):
    """Neither collect garbage nor ask git who we are: that takes longer than all the rest."""
    about = env.describe()
    monkeypatch.setattr(env, "describe", lambda device: json.loads(json.dumps(about)))
    monkeypatch.setattr(runner.gc, "collect", int)
