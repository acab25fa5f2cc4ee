"""Test that exported files compute the model's results in their own runtime, or do not exist."""

import dataclasses
import importlib.util
import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tresnet
from tests import toys
from tests.hf import as_dataset
from tests.models.public_network import randomise
from tresnet.cli.main import main as run
from tresnet.data import digits
from tresnet.data.sources import open_split
from tresnet.errors import (
    CheckpointError,
    DataError,
    ExportError,
    InputError,
    MissingDependencyError,
    WriteError,
)
from tresnet.export import FORMATS, CompiledPackage, ExportOptions, export_model, load_aoti
from tresnet.export.formats import _refuse_other_sizes
from tresnet.export.image_spec import Images, open_labelled
from tresnet.export.plain import plain_model
from tresnet.export.write import FP16_LIMIT, _both
from tresnet.settings import DataOptions

WEIGHTS = "tresnet_t.digits"


def needs(format, extra=()):
    for package in (*FORMATS[format].packages, *extra):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'tresnet[onnx,openvino,int8]'")


def suffix(format):
    return FORMATS[format].suffixes[0]


def small(name="tresnet_t", **options):
    """Create a small model with random values in each tensor."""
    model = toys.small(name, layers=(1, 1, 1, 1), **options)
    return randomise(model, torch.Generator().manual_seed(1)).eval()


def images(count=3, height=32, width=32):
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def test_what_is_exported_has_plain_operators_of_at_most_four_dimensions():
    plain = plain_model(small(block_size=4))
    program = torch.export.export(plain, (torch.rand(2, 3, 64, 64),))
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    kinds = {node.target.overloadpacket.__name__ for node in nodes}
    assert kinds <= {
        *("conv2d", "leaky_relu_", "relu_", "relu", "avg_pool2d", "add", "mean", "slice"),
        *("unsqueeze", "select", "sigmoid", "mul", "linear", "dropout"),
    }
    assert max(node.meta["val"].dim() for node in nodes) == 4


# pt2 and openvino are slow: the command's test also exports a pt2, and openvino converts ONNX
FORMATS_COMPARED = ("onnx", *(pytest.param(f, marks=pytest.mark.slow) for f in ("pt2", "openvino")))


@pytest.fixture(scope="module", params=FORMATS_COMPARED)
def exported(request, digits_folder, tmp_path_factory):
    """Export a model for the digits; return the format, the model, the path and the result."""
    needs(request.param)
    model, folder = small(num_classes=10), tmp_path_factory.mktemp("exported")
    path = folder / f"digits{suffix(request.param)}"
    dynamic = "dynamic_size" in FORMATS[request.param].takes
    options = ExportOptions(
        request.param, input="uint8", dynamic_size=dynamic, data=str(digits_folder)
    )
    return request.param, model, path, export_model(model, path, options, classes=digits.CLASSES)


def test_a_file_computes_what_the_model_does_and_says_what_it_takes(exported):
    format, model, path, done = exported
    assert (done.images, done.top1) == (359, done.model_top1)
    assert done.difference <= FORMATS[format].limit
    assert {file.suffix for file in path.parent.iterdir()} == set(FORMATS[format].suffixes)
    opened = FORMATS[format].open(path)
    dynamic = "dynamic_size" in FORMATS[format].takes
    # the least size, and a size that is not square and gives odd sides in some stages
    for size in ((18, 18), (22, 50)) if dynamic else ((32, 32),):
        x = images(4, *size)
        with torch.no_grad():
            torch.testing.assert_close(opened(x), model(x), rtol=1e-4, atol=1e-4)
    refusal = r"divisible[ _]by[ _]2|Guard failed: x.size\(\)\[\d\] >= 18"
    for size in ((33, 32), (32, 33), (8, 8), (16, 40), (40, 16), (17, 17)) if dynamic else ():
        with pytest.raises(Exception, match=refusal):
            opened(images(1, *size))
    metadata = stored(format, path)
    assert tuple(metadata["classes"]) == digits.CLASSES
    assert metadata["images"]["input"] == "uint8"
    assert metadata["preprocessing"]["crop_mode"] == "center"


def test_an_exported_file_predicts_what_its_weights_do(exported, tmp_path):
    format, model, file, _ = exported
    if format != "onnx":
        pytest.skip("tresnet.predict runs ONNX files alone")
    weights, pictures = tmp_path / "a.pth", list(images(5, 40, 50))
    tresnet.save_checkpoint(model, weights, metadata={"classes": digits.CLASSES})
    by_torch = tresnet.predict(pictures, weights=weights, top_k=4)
    by_onnx = tresnet.predict(pictures, weights=file, top_k=4, runtime="onnx")
    for one, other in zip(by_torch, by_onnx, strict=True):
        assert (one.classes, one.numbers) == (other.classes, other.numbers)
        assert one.probabilities == pytest.approx(other.probabilities, rel=1e-3)
    other = tmp_path / "b.onnx"
    other.write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"b.onnx is not a model written by tresnet export"):
        tresnet.predict(pictures, weights=other, runtime="onnx")


@pytest.mark.parametrize(
    "options",
    [
        {"head": "group_attention", "num_classes": 7, "head_groups": [3, 4], "head_channels": 16},
        {"num_classes": 0},
        {"global_pool": "avgmax"},
        {"norm": "batchnorm"},
        {"norm": "inplace_abn"},
        {"name": "tresnet_v2_l", "width_factor": 0.25},
        {"name": "tresnet_l", "width_factor": 0.3},  # widths that are not multiples of 8
        {"in_chans": 1},
    ],
    ids=str,
)
def test_the_plain_model_is_the_model_whatever_its_head_and_norm(options):
    if options.get("norm") == "inplace_abn":
        pytest.importorskip("inplace_abn")
    model = small(**options)
    x = torch.rand(2, model.config.in_chans, 44, 60)
    with torch.no_grad():
        torch.testing.assert_close(plain_model(model)(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["ml_decoder", "group_attention"])
def test_the_other_heads_can_be_exported_and_a_fixed_size_is_kept(head, tmp_path):
    needs("onnx")
    path = tmp_path / "head.onnx"
    model = small(head=head, head_channels=16)
    options = ExportOptions("onnx", input_size=(40, 48))
    assert export_model(model, path, options).difference <= 1e-5
    opened = FORMATS["onnx"].open(path)
    assert opened(images(7, 40, 48) / 255).shape == (7, 5)
    with pytest.raises(Exception, match=r"(?i)dimension"):
        opened(images(7, 44, 48) / 255)
    (prediction,) = tresnet.predict(images(1, 30, 36), weights=path, runtime="onnx")
    assert prediction.image == "image 0"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_eight_bits_cost_at_most_three_tenths_of_a_point(
    format, digits_folder, tmp_path, monkeypatch
):
    needs(format, ["torchao"] if format == "pt2" else [])
    trained = tresnet.create(weights=WEIGHTS).eval()
    path = tmp_path / f"int8{suffix(format)}"
    options = ExportOptions(format, int8=True, data=str(digits_folder), overwrite=True)
    done: Any = export_model(trained, path, options)
    assert done.top1 >= done.model_top1 - 0.3
    assert path.stat().st_size < 0.6 * 4 * sum(p.numel() for p in trained.parameters())
    before = path.read_bytes()
    monkeypatch.setattr("tresnet.export.write.INT8_TOP1_FALL", -1.0)
    with pytest.raises(ExportError, match=r"top-1 within .* on 359 images .* without int8"):
        export_model(trained, path, options)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def stored(format, path):
    """Read the metadata with the runtime of the format."""
    if format == "onnx":
        import onnxruntime

        texts = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
        return {key: json.loads(text) for key, text in texts.items()}
    if format == "openvino":
        import openvino

        texts = openvino.Core().read_model(path).get_rt_info(["tresnet"]).value
        return {key: json.loads(text) for key, text in texts.items()}
    files = {"tresnet": ""}
    torch.export.load(path, extra_files=files)
    return json.loads(files["tresnet"])


@pytest.mark.parametrize(
    ("added", "message"),
    [(1.0, "within 1e-05 of the model's, got .* removed"), (torch.nan, "shape .* not finite")],
)
def test_a_file_that_computes_something_else_is_not_left(added, message, tmp_path, monkeypatch):
    other, path = small(), tmp_path / "wrong.pt2"
    other.head.fc.bias.data[0] += added
    monkeypatch.setattr("tresnet.export.write.plain_model", lambda model: plain_model(other))
    path.write_bytes(b"what was there")
    with pytest.raises(ExportError, match=message):
        export_model(small(), path, ExportOptions("pt2", overwrite=True))
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"what was there"]


def bad(
    message, error: Any = InputError, model=small, path="x.pt2", format="pt2", about=(), **options
):
    options = {"format": format, **options}
    return pytest.param(model, path, options, dict(about), error, message, id=message)


DIGITS = "the folder of the digits"


@pytest.mark.parametrize(
    ("model", "path", "options", "about", "error", "message"),
    [
        bad("--format: expected .onnx., .pt2., .* got .tflite.", format="tflite"),
        bad("ends in .onnx for onnx", format="onnx"),
        bad("with int8, got 'openvino'", format="openvino", int8=True),
        bad("there.pt2 exists: choose", path="there.pt2"),
        bad("no_such does not exist", error=WriteError, path="no_such/x.pt2"),
        bad("--input: expected 'float' or 'uint8', got 'fp16'", input="fp16"),
        bad("input_size divisible by 2 and at least 10, got 33", input_size=33),
        bad("out of aoti with channels_last, got 'pt2'", channels_last=True),
        bad("out of onnx, pt2 with dynamic_size", format="openvino", dynamic_size=True),
        bad("data with int8", int8=True),
        bad("in eval mode", model=lambda: small().train()),
        bad("float32, got torch.float16", model=lambda: small().half()),
        bad("gives logits, got FeatureGetterNet", model=lambda: small(features_only=True)),
        bad("gives logits, got Linear", model=lambda: nn.Linear(2, 2)),
        bad(
            "expected weights with values, got the meta device", model=lambda: small(device="meta")
        ),
        bad("is not a folder", error=DataError, data="no_data"),
        bad("3 channels, got labels 'multi'", data=DIGITS, about={"labels": "multi"}),
        bad("and 1 channels: leave it out", data=DIGITS, model=lambda: small(in_chans=1)),
        bad("the weights have 5 classes, the data 10", error=DataError, data=DIGITS),
        bad("expected the names of 5 classes, got 1", about={"classes": ("cat",)}),
        bad("from 0 to 1, got 7.0", about={"labels": "multi", "threshold": 7.0}),
    ],
)
def test_bad_input_is_named(
    model, path, options, about, error, message, digits_folder, tmp_path, monkeypatch
):
    if options.get("data") == DIGITS:
        options["data"] = str(digits_folder)
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there.pt2"
    there.write_bytes(b"mine")
    with pytest.raises(error, match=message):
        export_model(model(), path, ExportOptions(**options), **about)
    assert list(tmp_path.iterdir()) == [there]
    assert there.read_bytes() == b"mine"


@pytest.mark.parametrize("names", ["ab", "aB"])
def test_names_in_a_file_are_sorted_for_weights_without_names(names, tmp_path):
    rows = []
    for name in names:
        Image.new("RGB", (32, 32)).save(tmp_path / f"{name}.png")
        rows.append(f"{name}.png,{name}\n")
    (tmp_path / "val.csv").write_text("image,label\n" + "".join(rows))
    model, takes = small(num_classes=2), Images(3, 32, 2, input="uint8", channels_last=False)
    orders = "in either order: B, a .* or a, B .*--class-map FILE"
    with nullcontext() if names == "ab" else pytest.raises(DataError, match=orders):
        dataset = open_labelled(str(tmp_path), "val", model, takes, None, DataOptions())
        assert (dataset.classes, dataset.targets.tolist()) == (["a", "b"], [0, 1])


@pytest.mark.parametrize(
    ("format", "extra", "int8"),
    [
        *((name, name, False) for name in ("onnx", "openvino", "tensorrt")),
        ("pt2", "int8", True),
    ],
)
def test_a_missing_package_is_named_with_its_extra(format, extra, int8, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options = ExportOptions(format, int8=int8, data=str(tmp_path))
    with pytest.raises(MissingDependencyError, match=rf"pip install 'tresnet\[{extra}\]'"):
        export_model(small(), tmp_path / f"x{suffix(format)}", options)


@pytest.mark.parametrize("input", [pytest.param("float", marks=pytest.mark.slow), "uint8"])
def test_sixteen_bits_are_those_of_the_maps_alone(input, digits_folder, tmp_path):
    needs("onnx")
    import onnx

    model, path = tresnet.create(weights=WEIGHTS).eval(), tmp_path / "half.onnx"
    options = ExportOptions(
        "onnx", input=input, fp16=True, data=str(digits_folder), dynamic_size=True
    )
    done = export_model(model, path, options, classes=digits.CLASSES)
    assert 1e-5 < done.difference < FP16_LIMIT
    assert abs(done.top1 - done.model_top1) < 0.3  # an image of 359
    graph = onnx.load(path).graph
    weights = [one for one in graph.initializer if len(one.dims) > 1]
    assert {one.data_type for one in weights} == {onnx.TensorProto.FLOAT16}
    types = {one.name: one.type.tensor_type.elem_type for one in (*graph.input, *graph.output)}
    own = onnx.TensorProto.UINT8 if input == "uint8" else onnx.TensorProto.FLOAT
    assert types == {"images": own, "logits": onnx.TensorProto.FLOAT}


@pytest.mark.gpu
@pytest.mark.parametrize("fp16", [False, True])
def test_a_plan_of_tensorrt_computes_what_the_model_does(fp16, digits_folder, tmp_path):
    pytest.importorskip("tensorrt", exc_type=ImportError)
    needs("tensorrt")
    model, path = tresnet.create(weights=WEIGHTS).eval(), tmp_path / "digits.plan"
    options = ExportOptions(
        "tensorrt", input="uint8", fp16=fp16, data=str(digits_folder), batch_size=4
    )
    done = export_model(model, path, options, classes=digits.CLASSES)
    assert (done.images, done.top1 > 98) == (359, True)
    opened, x = FORMATS["tensorrt"].open(path), images(4)
    with torch.no_grad():
        expected = model(x)
    tolerance = FP16_LIMIT if fp16 else 1e-4
    limit = tolerance * max(1, expected.abs().max().item())
    torch.testing.assert_close(opened(x).cpu(), expected, rtol=0, atol=limit)
    assert json.loads(path.with_suffix(".json").read_text())["fp16"] == fp16
    for wrong in (images(33), images(1, 33, 32)):
        with pytest.raises(InputError, match="takes no images of shape"):
            opened(wrong)


def test_model_and_file_are_compared_without_tf32():
    model, seen = small(), []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    _both(model, model, torch.rand(1, 3, 32, 32))
    with pytest.raises(ZeroDivisionError):
        _both(lambda batch: 1 / 0, model, torch.rand(1, 3, 32, 32))
    assert (seen, torch.backends.cudnn.allow_tf32) == ([False] * 3, True)


def test_a_plan_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="builds a plan on a GPU, and PyTorch sees none"):
        export_model(small(), tmp_path / "x.plan", ExportOptions("tensorrt"))


def test_the_command_exports_weights_by_their_tag(digits_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = as_dataset(open_split(digits_folder, "val"))
    rows.save_to_disk("set/val")
    assert run(["export", WEIGHTS, "--format", "pt2", "--data", "set"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{WEIGHTS}.pt2")
    assert "top-1 on 359 images" in shown
    assert float(shown.split()[-2]) > 98  # the model's top-1
    metadata = stored("pt2", f"{WEIGHTS}.pt2")
    assert (tuple(metadata["classes"]), metadata["threshold"]) == (digits.CLASSES, None)


def test_the_command_names_its_file_by_the_weights_and_stores_their_threshold(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    user = {"classes": tuple("abcde"), "labels": "multi", "threshold": 0.3}
    tresnet.save_checkpoint(small(), "mine.v2.pth", metadata=user)
    assert run(["export", "mine.v2.pth", "--format", "pt2"]) == 0
    assert stored("pt2", "mine.v2.pt2").items() >= {**user, "classes": list("abcde")}.items()


@pytest.mark.parametrize("content", [None, b"no package"])
def test_what_is_no_package_is_not_opened(content, tmp_path):
    path = tmp_path / "x.pt2"
    if content:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no package at|not a package"):
        load_aoti(path)


@pytest.mark.slow
@pytest.mark.parametrize(("input", "channels_last"), [("float", True), ("uint8", False)])
def test_a_compiled_package_computes_what_the_model_does(
    input, channels_last, tmp_path, monkeypatch
):
    model, path = small(), tmp_path / "x.pt2"
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", str(int(input == "float")))
    options = ExportOptions("aoti", input=input, channels_last=channels_last)
    assert export_model(model, path, options, classes=tuple("abcde")).difference <= 1e-5
    package = load_aoti(path)
    assert package.metadata["classes"] == list("abcde")
    for count in (5, 1):
        x = package.images.prepare(images(count))
        with torch.no_grad():
            torch.testing.assert_close(package(x), model(x), rtol=1e-5, atol=1e-5)
    if input == "uint8":  # the package itself gives wrong results for another layout
        raw = torch._inductor.aoti_load_package(str(path))
        wrong = raw(x.contiguous(memory_format=torch.channels_last))
        assert not torch.allclose(wrong, model(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("input", "channels_last"), [("float", True), ("uint8", False)])
def test_a_compiled_package_refuses_what_it_would_misread(input, channels_last):
    takes = Images(3, 32, 2, input=input, channels_last=channels_last)
    package: Any = CompiledPackage(
        torch.sum, {"images": dataclasses.asdict(takes), "device": "cpu"}
    )
    x = takes.prepare(images())
    assert torch.equal(package(x), x.sum())
    other = torch.contiguous_format if channels_last else torch.channels_last
    for refused, message in (
        (x.contiguous(memory_format=other), "expected images in torch"),
        (x.double(), f"expected torch.{'uint8' if input == 'uint8' else 'float32'}"),
        (x[:, :1], r"expected images \(N, 3, H, W\)"),
        (x[:, :, :22], r"height and width \(32, 32\), got \(22, 32\)"),
        (x[:0], "at least one image"),
        (x.numpy(), "got ndarray"),
        (torch.empty_like(x, device="meta"), "expected images on cpu, got them on meta"),
    ):
        with pytest.raises(InputError, match=message):
            package(refused)


def test_each_side_is_refused_by_itself():
    """81 x 52 pixels are as many as 78 x 54, which are multiples of 6."""
    onnx = pytest.importorskip("onnx.parser")
    runtime = pytest.importorskip("onnxruntime")
    model = onnx.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        sizes (float[N, 1, H, W] images) => (float[N, 1, H, W] logits) {
            logits = Identity (images)
        }""")
    _refuse_other_sizes(model.graph, SimpleNamespace(multiple=6, least=48))
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session = runtime.InferenceSession(model.SerializeToString(), options)
    for height, width in itertools.product(range(42, 90), repeat=2):
        right = min(height, width) >= 48 and height % 6 == width % 6 == 0
        with nullcontext() if right else pytest.raises(Exception, match="divisible_by_6_and_at_l"):
            session.run(None, {"images": np.empty((1, 1, height, width), np.float32)})
