import pytest
import torch


@pytest.fixture
def cuda_device() -> torch.device:
    """The GPU of the tests marked gpu, which are skipped where there is none."""
    return torch.device("cuda", torch.cuda.current_device())
