import pytest
import torch
from torchvision.transforms.functional import convert_image_dtype

from tresnet.ops.unit_floats import unit_floats

# Every byte once.
EVERY = torch.arange(256, dtype=torch.uint8).reshape(4, 2, 4, 8)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("stored", LAYOUTS)
@pytest.mark.parametrize("wanted", [torch.preserve_format, *LAYOUTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("largest", [255.0, torch.tensor(255.0)], ids=["number", "tensor"])
def test_floats_are_torchvisions_rounded_once(stored, wanted, dtype, largest):
    images = EVERY.contiguous(memory_format=stored)
    floats = unit_floats(images, dtype=dtype, memory_format=wanted, largest=largest)
    layout = stored if wanted is torch.preserve_format else wanted
    assert floats.is_contiguous(memory_format=layout)
    assert torch.equal(floats, convert_image_dtype(EVERY, torch.float32).to(dtype))


@pytest.mark.gpu
def test_a_gpu_divides_by_a_tensor_as_the_cpu_does():
    largest = torch.tensor(255.0, device="cuda")
    assert torch.equal(unit_floats(EVERY.cuda(), largest=largest).cpu(), unit_floats(EVERY))


def test_it_compiles_into_the_graph_of_the_step():
    compiled = torch.compile(unit_floats, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(EVERY, dtype=torch.bfloat16), unit_floats(EVERY).bfloat16())
