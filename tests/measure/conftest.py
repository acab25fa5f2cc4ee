import pytest
import torch


@pytest.fixture
def cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: this test measures a GPU")
    return torch.device("cuda", torch.cuda.current_device())
