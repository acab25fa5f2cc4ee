"""Messages of the Python API about bad input, one each; tests/engine has those of the commands."""

import logging
import os
from math import nan
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tresnet
from tests.toys import NEEDS_PACKAGE, smallest
from tresnet.devices import usable_device
from tresnet.engine.config import TrainConfig
from tresnet.errors import InputError, TResNetError
from tresnet.layers.grouped_linear import GroupedLinear
from tresnet.layers.norm import InplaceABN
from tresnet.layers.parallel_bottleneck import ParallelBottleneck
from tresnet.layers.subtracted_conv import SubtractedConv
from tresnet.measure import records
from tresnet.measure.cases import BenchCase, parse_case
from tresnet.measure.records import check_directory
from tresnet.measure.settings import LargestSettings
from tresnet.memory import max_batch, predict
from tresnet.memory.device import GENERIC
from tresnet.memory.snapshot import write_snapshot
from tresnet.peers import build_named, check_name
from tresnet.settings.fields import replace


def conv(then):
    """Return a convolution whose output goes through `then`."""
    model = nn.Conv2d(3, 3, 1)
    model.register_forward_hook(lambda module, args, y: then(y))
    return model


class FailingSgd(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no driver")


def on_a_gpu():
    model = nn.Linear(2, 2)
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
    return model


def uncopyable():
    model = nn.Linear(2, 2)
    model.lock = (n for n in range(3))
    return model


def opaque(x):
    """Call an operator without a kernel for fake tensors."""
    with torch.library._scoped_library("tresnet_tests", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x.clone(), "CPU")
        return torch.ops.tresnet_tests.opaque(x)


SIZE, RESNET = {"input_size": 8}, "timm:resnet18"
GROUPED = GroupedLinear(4, (1, 2, 3))
PARALLEL = ParallelBottleneck(3, 8, shared_input=False)
CONV = nn.Conv2d(8, 8, 3, padding=1, bias=False)
SMALLEST = smallest()


def create(options):
    return tresnet.create(**{"name": "tresnet_t", "num_classes": 6, **options})


def call(function):
    return function()


def build(name, options):
    build_named(name, device="meta", **options)


def intermediates(indices, options):
    SMALLEST.forward_intermediates(torch.rand(1, 3, 32, 32), indices, **options)


def predicted(model, settings):
    predict(model, **{"batch_size": 2, **settings})


def checked(model, training, changes):
    replace(BenchCase(model), **changes).checked(training)


# Rows of each function: its arguments, and a pattern of the message.
ROWS = {}
ROWS[create] = [
    ({"name": "tresnet_v2"}, "unknown model 'tresnet_v2': did you mean 'tresnet_v2_l'"),
    ({"norm": "layernorm"}, "norm: expected 'abn', .*, got 'layernorm'"),
    ({"global_pool": "median"}, "global_pool: expected 'avg', .*, got 'median'"),
    ({"num_classes": -1}, "num_classes: expected at least 0, got -1"),
    ({"num_classes": 5, "global_pool": ""}, "needs a global pool"),
    ({"block_size": 0}, "block_size: expected at least 1, got 0"),
    ({"layers": (1, 2, 3)}, r"layers: expected more values, got \(1, 2, 3\)"),
    ({"width_factor": 0.001}, "width_factor: expected at least 0.015625, got 0.001"),
    ({"name": 5}, "unknown model 5: expected one of tresnet_d"),
    ({"num_class": 5}, "unknown option 'num_class': did you mean 'num_classes'"),
    ({"num_classes": "10"}, "num_classes: expected a valid integer, got '10'"),
    ({"layers": "3463"}, "layers: expected a valid tuple, got '3463'"),
    ({"layers": (1, 1, 10**9, 1)}, "layers: expected at most 1000, got 1000000000"),
    ({"head": 1}, "head: expected 'linear', .*'ml_decoder', got 1"),
    ({"head": "group_attention", "head_groups": "12"}, "head_groups: expected a valid tuple"),
    ({"head": "ml_decoder", "head_channels": 10**9}, "head_channels: expected at most 65536"),
    ({"head": "group_attention", "head_groups": (2, 3)}, "add up to num_classes=6.*to 5"),
    ({"head": "group_attention", "head_groups": (6, 0)}, "head_groups: expected at least 1"),
    ({"head": "group_attention", "head_groups": (1.5, 4.5)}, "head_groups: .* valid integer"),
    ({"head": "group_attention", "head_groups": 7}, "1 to 6 groups for 6 classes.*=7"),
    ({"head": "group_attention", "head_channels": 7}, "channels divisible by reduction"),
    ({"head": "group_attention", "head_channels": -2}, "head_channels: .*at least 1, got -2"),
    ({"head": "group_attention", "global_pool": "max"}, "pool of its own.*got 'max'"),
    ({"head_groups": 3}, "head_groups=3 needs head='group_attention', got 'linear'"),
    ({"head_channels": 8}, "head_channels=8 needs head="),
    ({"head": "ml_decoder", "head_channels": 12}, "8 heads, got 12"),
    ({"head": "ml_decoder", "drop_rate": 0.1}, "dropout of its own.*got 0.1"),
    ({"head": "ml_decoder", "global_pool": "max"}, "pool of its own.*got 'max'"),
    ({"device": "gpu"}, "expected a device such as cpu or cuda:0, got 'gpu'"),
    ({"dtype": torch.int8}, "expected dtype out of torch.float32, .*, got torch.int8"),
    ({"impl": "cuda"}, "unknown impl 'cuda'"),
    ({"norm": "batchnorm", "impl": "triton"}, "needs a model with norm='abn', got"),
    ({"recompute": 1}, "unknown recompute 1: expected one of activations, none"),
    ({"drop_rate": 1.0}, "drop_rate: expected less than 1, got 1.0"),
]
ROWS[check_name] = [
    ("keras:resnet50", "no source 'keras'"),
    ("tresnet_v2", "unknown model .*: did you mean 'tresnet_v2_l'.* torchvision:NAME"),
    ("TResNet_XL", "did you mean 'tresnet_xl'"),
    ("timm:resnet5O", "unknown model of timm 'resnet5O': did you mean 'resnet50'"),
    ("torchvision:resnet-50", "did you mean 'resnet50'"),
    ("timm:", "unknown model of timm '': expected one of"),
    ("timm:nosuch", "expected one of tnt_s_patch16_224, .* more$"),
    ("tresnet_m@norm=abn", "unknown model .*: did you mean 'tresnet_"),
    (3, "expected a model's name, got 3"),
]
ROWS[build] = [
    ("timm:resnet50", {"norm": "abn"}, "timm:resnet50 takes no option norm"),
    ("timm:poolformer_s12", {"impl": "auto"}, "timm:poolformer_s12 takes no option impl"),
    ("timm:hrnet_w18", {"head": "linear"}, "timm:hrnet_w18 takes no option head"),
    ("torchvision:convnext_tiny", {"norm": "abn"}, "convnext_tiny takes no option norm"),
    ("torchvision:resnet18", {"in_chans": 1}, "torchvision:resnet18 takes no option in_chans"),
]
ROWS[usable_device] = [
    ("gpu0", "expected a device such as cpu or cuda:0, got 'gpu0'"),
    ("meta", "a device that computes, .* got 'meta'"),
    ("cuda:99", "got 'cuda:99', but PyTorch sees"),
    ("mps", r"expected a device of this machine, got 'mps' \(.{1,150}\): use cpu or cuda$"),
    ("privateuseone", "expected a device of this machine, got 'privateuseone'"),
]
ROWS[SMALLEST] = [
    (torch.rand(3, 32, 32), r"expected images \(N, 3, H, W\), got shape \(3, 32, 32\)"),
    (torch.rand(1, 4, 32, 32), "expected 3 channels, got 4 .*in_chans=4"),
    (torch.rand(1, 3, 33, 32), r"divisible by 2, got \(33, 32\): pad or resize"),
    (torch.rand(1, 3, 32, 32).numpy(), r"images \(N, 3, H, W\), got ndarray"),
    (torch.rand(1, 3, 10, 10), "more than one value per channel"),
]
ROWS[intermediates] = [
    ([5], {}, r"feature indices in \[-5, 4\], got \[5\]"),
    *((wrong, {}, r"feature indices in \[-5, 4\], got ") for wrong in ("x", ["a"], [1.5], 2.5)),
    (6, {}, "1 to 5 as a number of feature maps, .* got 6"),
    (None, {"output_fmt": "NLC"}, "output_fmt 'NCHW', got 'NLC'"),
]
ROWS[call] = [
    *(
        (lambda sizes=sizes: GroupedLinear(*sizes), "at least one output for each group")
        for sizes in ((0, (1,)), (4, ()), (4, (2, 0)), (4, (2, -1)))
    ),
    (lambda: GROUPED(torch.zeros(2, 8)), r"\(N, 12\) or \(N, 3, 4\), got \(2, 8\)"),
    *(
        (lambda sizes=sizes: ParallelBottleneck(*sizes), "channels divisible by reduction")
        for sizes in ((0, 8), (2, 0), (2, 9))
    ),
    (lambda: PARALLEL(torch.zeros(1, 8, 4, 4)), "expected 24 channels, got 8"),
    (lambda: SubtractedConv(3, 5, 3), "even out_channels.*got 5"),
    (lambda: SubtractedConv(3, 4, 2), "odd kernel_size.*got 2"),
    (lambda: SubtractedConv(0, 4, 3), "in_channels of at least 1, got 0"),
    (lambda: SubtractedConv(3, 4, 3, 0), "a stride of at least 1, got 0"),
    (lambda: SubtractedConv(3, 4, 3, mode="fast"), "branches, composed, recompute, got 'fast'"),
    (lambda: SubtractedConv(3, 4, 3)(torch.zeros(1, 4, 5, 5)), r"\(N, 3, H, W\), got \(1, 4, "),
    (lambda: SubtractedConv.replace_in(CONV), "inside Conv2d"),
    (lambda: SubtractedConv.replace_in(nn.Sequential(CONV), mode="most"), "got 'most'"),
    (lambda: replace(TrainConfig(), epoch=3), "unknown option 'epoch': did you mean 'epochs'"),
    (lambda: predict("tresnet_t"), r"^predict\(\) missing .*'batch_size'$"),
    (lambda: predict("tresnet_t", batch_size=1, batch=1), r"^predict\(\) got an unexp.*'batch'$"),
    (lambda: max_batch("tresnet_t", device=GENERIC), "80GiB .*, or the GPU's name by --gpu"),
    (lambda: max_batch("tresnet_t", device="b200"), "GPU 'b200': .*or give only its memory"),
    (
        lambda: write_snapshot(predict("tresnet_t", batch_size=2), Path("no/memory.pickle")),
        "no does not exist",
    ),
]
ROWS[predicted] = [
    ("tresnet_t", {"batch_size": 0}, "^batch_size: expected at least 1, got 0"),
    *(
        ("tresnet_t", {"gpu_memory": n}, "expected a size such as '80GiB'")
        for n in ("80 gigs", nan, "9" * 400)
    ),
    ("tresnet_t", {"ema_decay": 1}, "^ema_decay: expected less than 1, got 1"),
    ("tresnet_t", {"amp": None}, "^amp: expected 'auto', 'off', 'bf16' or 'fp16', got None"),
    ("tresnet_t", {"opt": 3}, "opt: expected a valid string, got 3"),
    ("tresnet_t", {"opt": FailingSgd}, "failingsgd failed on fake tensors after .*: no driver"),
    ("tresnet_t", {"dtype": "bf16"}, "no dtype for tresnet_t, got 'bf16': it is for inference"),
    ("tresnet_t", {"train": False, "ema_decay": 0.9}, "no ema_decay .*: it is for training"),
    ("tresnet_t", {"device": "gtx1"}, "unknown GPU 'gtx1': expected one of a100"),
    ("tresnet_t", {"grad_checkpointing": "layer1"}, "grad_checkpointing: .* a valid boolean"),
    ("tresnet_t", {"input_size": (4, 32, 32)}, "expected 3 channels, got 4"),
    ("tresnet_q", {}, "unknown model 'tresnet_q': did you mean .*timm:NAME and torch"),
    (3, {}, "expected a model's name, a torch.nn.Module or a function"),
    (lambda: 3, {}, "expected a model's name, a torch.nn.Module or a function .*, got int"),
    (nn.Identity(), {}, "expected a model with parameters to train"),
    (nn.Sequential(nn.LSTM(8, 2)), {}, "without recurrent layers, got LSTM at 0: cuDNN's mem"),
    (nn.Embedding(8, 2), {}, "aten.embedding .*the model, which must take a batch of images$"),
    (nn.Sequential(nn.LazyLinear(3)), {}, "uninitialised ones in Sequential"),
    (nn.DataParallel(nn.Linear(2, 2)), {}, "wrapped in DataParallel: pass model.module"),
    (torch.compile(nn.Linear(2, 2)), {}, "got a compiled model: pass the model before"),
    (torch.jit.script(nn.Linear(2, 2)), {}, "got a TorchScript model: pass the model before"),
    (nn.Linear(2, 2), {"num_classes": 3}, "got num_classes: give these options to the"),
    (nn.Linear(2, 2), {"grad_checkpointing": True}, "set up .*no attribute 'set_grad_ch"),
    (nn.Linear(8, 2), {"compile": "default"}, "compile: expected none, got default"),
    (nn.Linear(8, 2), {"cuda_graph": "on"}, "cuda_graph: expected off or auto, got on"),
    (on_a_gpu(), {}, "CPU or the meta device, got a model on cuda:0"),
    (uncopyable(), {}, r"Linear cannot be copied.*pass a function that builds the model"),
    (conv(lambda y: y if y.max() > 0 else -y), SIZE, "depends on the values of .*y.max.. > 0"),
    (conv(torch.nonzero), SIZE, "aten.nonzero.*depends on the values of a tensor"),
    (conv(opaque), SIZE, r"tresnet_tests.opaque cannot run on fake tensors.*register_fake"),
    (RESNET, {"input_size": (4, 8, 8)}, "of 2 of 4x8x8 at aten.conv.* in conv1.*check input_"),
]
if not torch.cuda.is_available():
    message = "needs a tensor's data or the GPU itself.*: replace this code"
    ROWS[predicted].append((conv(lambda _: torch.cuda.synchronize()), SIZE, message))
ROWS[checked] = [
    ("tresnet_x", True, {}, "did you mean 'tresnet_"),
    ("timm:resnet5O", True, {}, "did you mean 'resnet50'"),
    ("tresnet_t", True, {"freeze": True}, "it is for inference"),
    ("tresnet_t", True, {"dtype": "bf16"}, "no dtype for tresnet_t, got 'bf16': it is for inf"),
    ("tresnet_t", False, {"recompute": "none"}, "it is for training"),
    ("tresnet_t", False, {"accumulate": 2}, "it is for training"),
    ("tresnet_t", False, {"freeze": True}, "a compile mode with freeze=true .*, got none"),
    (RESNET, True, {"layout_opt": True}, "a compile mode with layout_opt=true"),
    (RESNET, True, {"recompute": "none"}, "a compile mode with recompute=none"),
    ("tresnet_t", True, {"accumulate": 2, "compile": "max-autotune"}, "loses gradients"),
    (RESNET, True, {"norm": "batchnorm"}, "no norm for timm:resnet18, got 'batchn"),
    (RESNET, True, {"impl": "triton"}, "no impl for timm:resnet18, got 'triton'"),
]
ROWS[lambda option: parse_case(f"tresnet_t@{option}", BenchCase())] = [
    ("dtype", "expected MODEL@key=value,.* got 'dtype'"),
    ("model=x", "expected MODEL@key=value,.* got 'model=x'"),
    ("norm=", "expected MODEL@key=value,.* got 'norm='"),
    ("batch_size=many", "tresnet_t: batch_size: expected a valid integer, unable"),
    ("impl=auto,impl=triton", "expected impl= once for tresnet_t, got another 'impl"),
]
ROWS[lambda changes: LargestSettings(**changes).check()] = [
    ({"first": 3}, "expected a first batch divisible by 16, got 3"),
    ({"at_most": 63}, r"expected --at-most of at least 64 \(--first\), got 63"),
]
ROWS[check_directory] = [
    (name, "expected a directory that records can be written to")
    for name in ("file", "file/sub", "link", "n" * 300)
]


@pytest.mark.parametrize(
    ("function", "row"),
    [pytest.param(function, row, id=row[-1]) for function, rows in ROWS.items() for row in rows],
)
def test_bad_input_is_explained(function, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(tmp_path / "gone" / "further")
    Path("file").touch()
    *arguments, message = row
    with pytest.raises((TResNetError, TypeError), match=message):
        function(*arguments)


def test_the_in_place_package_is_named():
    """Refuse the inplace-abn package, whose functions cannot run on fake tensors."""
    pytest.importorskip("inplace_abn")
    with pytest.raises(InputError, match="such as norm='inplace_abn' by norm='abn'"):
        predict("tresnet_t", batch_size=4, norm="inplace_abn", amp="off")


def test_an_operation_that_rejects_its_input_logs_no_traceback(monkeypatch, caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with pytest.raises(InputError, match=r"same reduction dim.*check input_size and the model"):
        predict(nn.Linear(8, 2), batch_size=2, input_size=(1, 1, 4))
    assert not caplog.text
    assert not log.disabled


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(dir):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(records.tempfile, "TemporaryFile", full)
    with pytest.raises(InputError, match=r"No space left on device.*choose another or free"):
        check_directory(tmp_path)


def test_the_smallest_sizes_are_accepted():
    assert GroupedLinear(1, (1,))(torch.ones(2, 1)).shape == (2, 1)
    assert ParallelBottleneck(1, 1, reduction=1)(torch.ones(2, 1, 1, 1)).shape == (2, 1, 1, 1)


@NEEDS_PACKAGE
@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cuda", torch.bfloat16, "no bfloat16 kernels for a cuda device: use float16, or"),
        ("cpu", torch.bfloat16, "no 16-bit kernels for a cpu device: use float32, or norm='abn'"),
        ("cpu", torch.float16, "no 16-bit kernels for a cpu device: use float32, or norm='abn'"),
    ],
)
def test_in_place_abn_refuses_dtypes_without_kernels(device: str, dtype: torch.dtype, message: str):
    norm = InplaceABN(2).eval()
    with FakeTensorMode(), pytest.raises(InputError, match=message):
        norm(torch.empty(1, 2, 3, 3, device=device, dtype=dtype))
