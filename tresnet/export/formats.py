"""Formats of exported models: functions that write, open and run each format."""

import contextlib
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from tresnet.errors import (
    CheckpointError,
    ExportError,
    InputError,
    MissingDependencyError,
    listed,
    needed,
    to_install,
)
from tresnet.export.image_spec import BATCH, Images
from tresnet.export.plain import trace
from tresnet.settings import ExportOptions, sides

METADATA_KEY = "tresnet"
# Keys of an ONNX file's metadata that `read_onnx` requires.
_PREDICTION_KEYS = (
    *("images", "preprocessing", "num_classes", "classes", "descriptions"),
    *("labels", "threshold"),
)
RunFunction = Callable[[Tensor], Tensor]


class Job(NamedTuple):
    """Model to write, traced by torch.export, with all other data that `Format.write` needs."""

    program: ExportedProgram
    images: Images
    metadata: dict[str, Any]  # plain values, stored in the file
    calibration: Sequence[Tensor] | None  # batches that determine the ranges of 8-bit values
    batch_size: int = 1  # number of images for which a plan of TensorRT is tuned

    def texts(self) -> dict[str, str]:
        """Return each value of the metadata as a JSON text."""
        return {key: json.dumps(value) for key, value in self.metadata.items()}


def _write_onnx(job: Job, path: Path) -> None:
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about its own code
        program = torch.onnx.export(
            job.program, input_names=["images"], output_names=["logits"], dynamo=True, verbose=False
        )
    assert program is not None, "the exporter returns None only if it gets a path"
    model = program.model_proto
    if job.images.dynamic_size:
        _refuse_other_sizes(model.graph, job.images)
    if job.calibration is not None:
        model = _quantise_onnx(model, job.calibration, path)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, job.texts())
    onnx.save(model, path)


def _refuse_other_sizes(graph: Any, images: Images) -> None:
    """Insert a Reshape node that fails if the height or the width is not accepted.

    The node keeps accepted sides, rounds others down to a multiple, and makes sides that are too
    small 0. Then the number of pixels differs, and the runtime raises an error that contains the
    node's name. The name states which sides are accepted.
    """
    from onnx import parser

    check = parser.parse_graph(f"""check (float[] images) => (float[] checked) {{
        batch_and_channels = Shape <start = 0, end = 2> (images)
        size = Shape <start = 2, end = 4> (images)
        multiple = Constant <value_int = {images.multiple}> ()
        least = Constant <value_int = {images.least}> ()
        blocks = Div (size, multiple)
        rounded = Mul (blocks, multiple)
        is_large = GreaterOrEqual (size, least)
        one_or_zero = CastLike (is_large, size)
        accepted = Mul (rounded, one_or_zero)
        shape = Concat <axis = 0> (batch_and_channels, accepted)
        checked = Reshape <allowzero = 1> (images, shape)
    }}""")
    rule = f"height_and_width_divisible_by_{images.multiple}_and_at_least_{images.least}"
    check.node[-1].name = rule
    for node in graph.node:
        node.input[:] = ["checked" if name == "images" else name for name in node.input]
    for node in reversed(check.node):
        graph.node.insert(0, node)


def _quantise_onnx(model: Any, calibration: Sequence[Tensor], path: Path) -> Any:
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    batches = ({"images": batch.numpy()} for batch in calibration)

    class CalibrationReader(quantization.CalibrationDataReader):
        def get_next(self) -> Any:  # returns None after the last batch
            return next(batches, None)

    floats, prepared = path.with_stem("floats"), path.with_stem("prepared")
    onnx.save(model, floats)  # given a model, quant_pre_process fails (onnxruntime 1.31)
    quant_pre_process(floats, prepared, skip_symbolic_shape=True)
    quantization.quantize_static(
        prepared,
        path,
        CalibrationReader(),
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    return onnx.load(path)


def open_onnx(path: Path) -> RunFunction:
    """Open an ONNX file in onnxruntime on the CPU."""
    return _run_onnx(_session(path))


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _run_onnx(session: Any) -> RunFunction:
    return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def read_onnx(path: Path) -> tuple[RunFunction, dict[str, Any]]:
    """Return (function from uint8 images to logits, metadata) of a file that `export_model` wrote.

    Any other file raises CheckpointError. Without onnxruntime, MissingDependencyError is raised.
    """
    with needed("format 'onnx'", "onnx"):
        import onnxruntime  # noqa: F401
    try:
        session = _session(path)
        texts = session.get_modelmeta().custom_metadata_map
        metadata = {key: json.loads(texts[key]) for key in _PREDICTION_KEYS}
        images, run = Images(**metadata["images"]), _run_onnx(session)
    except Exception as error:  # onnxruntime's errors have no common base class
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} is not a model written by tresnet export --format onnx ({reason:.200}): "
            "export it again"
        ) from error
    return (lambda x: run(images.prepare(x))), metadata


def _write_pt2(job: Job, path: Path) -> None:
    program = job.program if job.calibration is None else _quantise_pt2(job)
    torch.export.save(program, path, extra_files={METADATA_KEY: json.dumps(job.metadata)})


def _quantise_pt2(job: Job) -> ExportedProgram:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    assert job.calibration is not None
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torchao warns about its own code
        observed = prepare_pt2e(job.program.module(), quantizer)
        for batch in job.calibration:
            observed(batch)
        quantised = convert_pt2e(observed)
        # A new GraphModule has only tensors that its graph uses, so it lacks the 32-bit weights.
        quantised = torch.fx.GraphModule(quantised, quantised.graph)
        return trace(quantised, job.images, torch.device("cpu"))


def open_pt2(path: Path) -> RunFunction:
    """Open a program that torch.export saved, as a function that runs eagerly."""
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and newer warn of escapes in torchao's code
        # registers the operators of 8-bit programs
        import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401
    return torch.export.load(path).module()


def _write_aoti(job: Job, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package, config

    settings: dict[str, Any] = {"aot_inductor.metadata": job.texts()}
    # With AOTI_RUNTIME_CHECK_INPUTS=1, a dynamic batch of 1 image would be refused, but works.
    if hasattr(config.aot_inductor, "check_lowerbound"):
        settings["aot_inductor.check_lowerbound"] = False
    aoti_compile_and_package(job.program, package_path=str(path), inductor_configs=settings)


class CompiledPackage:
    """Model compiled ahead of time; `images` describes the accepted images.

    The compiled code checks neither dtypes nor strides. Images in another memory format would
    silently give wrong logits, so this class checks images before it runs the code.
    """

    def __init__(self, package: Any, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.images = Images(**metadata["images"])
        self.device = torch.device(metadata["device"])
        self._package = package

    def __call__(self, images: Tensor) -> Tensor:
        """Return logits (N, classes); raise InputError for images that do not fit the package."""
        self.images.check(images)
        if images.device.type != self.device.type:
            raise InputError(f"expected images on {self.device}, got them on {images.device}")
        with torch.inference_mode():
            return self._package(images)


def load_aoti(path: str | os.PathLike[str]) -> CompiledPackage:
    """Open a package that `export_model` wrote with format 'aoti'.

    Calling a package runs the machine code in the file: open only files that you trust.

    Raises:
        CheckpointError: the file does not exist, or is not a package of format 'aoti'.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"no package at {os.fspath(path)}: check the path")
    try:
        package = torch._inductor.aoti_load_package(os.fspath(path))
        stored = package.get_metadata().items()  # keys in capitals are AOTInductor's own
        return CompiledPackage(package, {k: json.loads(v) for k, v in stored if k[0].islower()})
    except (RuntimeError, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{os.fspath(path)} is not a package of tresnet export --format aoti for this machine "
            f"({next(iter(str(error).strip().splitlines()), type(error).__name__)})"
        ) from error


def _write_openvino(job: Job, path: Path) -> None:
    import openvino

    source = path.with_suffix(".onnx")
    _write_onnx(job, source)
    model = openvino.convert_model(source)
    for key, text in job.texts().items():
        model.set_rt_info(text, [METADATA_KEY, key])
    openvino.save_model(model, path, compress_to_fp16=False)


def open_openvino(path: Path, precision: str = "f32") -> RunFunction:
    """Open an OpenVINO file on the CPU; `precision` is 'f32', 'bf16' or 'f16'."""
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": precision,  # by default, OpenVINO uses 16 bits on some CPUs
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return lambda x: torch.from_numpy(compiled([x.numpy()])[0].copy())


def _write_tensorrt(job: Job, path: Path) -> None:
    """Write a plan for the GPU of this machine, and the metadata as a JSON file beside it."""
    import tensorrt as trt  # pyright: ignore[reportMissingImports]

    source = path.with_suffix(".onnx")
    _write_onnx(job, source)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    # The types of tensors are those of the ONNX file: always in TensorRT 11, by this flag in 10.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(source)):
        errors = listed(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise ExportError(f"TensorRT {trt.__version__} cannot read the model: {errors}")
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.clear_flag(trt.BuilderFlag.TF32)
    shape, most = (job.images.channels, *sides(job.images.size)), max(job.batch_size, BATCH)
    profile.set_shape("images", *((count, *shape) for count in (1, job.batch_size, most)))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ExportError(f"TensorRT {trt.__version__} cannot build the plan: see its messages")
    path.write_bytes(plan)
    path.with_suffix(".json").write_text(json.dumps(job.metadata), "utf-8")


def open_tensorrt(path: Path) -> RunFunction:
    """Open a plan of TensorRT on the current GPU; opening a plan may run code that is in the file.

    The function takes images of the size, dtype and largest number of the export.
    """
    import tensorrt as trt  # pyright: ignore[reportMissingImports]

    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise CheckpointError(f"{path} is not a plan for this GPU and TensorRT {trt.__version__}")
    context = engine.create_execution_context()
    dtype = torch.uint8 if engine.get_tensor_dtype("images") == trt.uint8 else torch.float32

    def run(images: Tensor) -> Tensor:
        if images.dtype != dtype:
            raise InputError(f"the plan takes images of {dtype}, got {images.dtype}")
        images = images.cuda().contiguous()
        if not context.set_input_shape("images", tuple(images.shape)):
            raise InputError(f"the plan takes no images of shape {tuple(images.shape)}")
        logits = torch.empty(tuple(context.get_tensor_shape("logits")), device=images.device)
        for name, tensor in (("images", images), ("logits", logits)):
            context.set_tensor_address(name, tensor.data_ptr())
        stream = torch.cuda.current_stream()
        if not context.execute_async_v3(stream.cuda_stream):
            raise ExportError(f"TensorRT could not run {path}")
        stream.synchronize()
        return logits

    return run


class Format(NamedTuple):
    """Functions that write and open files of a format, and what the format supports."""

    suffixes: tuple[str, ...]  # suffixes of written files; the user's path ends in the first suffix
    write: Callable[[Job, Path], None]
    open: Callable[[Path], RunFunction]
    takes: tuple[str, ...]  # supported options out of `_OPTIONS`
    packages: tuple[str, ...] = ()  # packages besides torch that `write` and `open` need
    limit: float = 1e-5  # largest allowed `Exported.difference` without int8 and fp16


_OPTIONS = "dynamic_size", "channels_last", "int8", "fp16", "batch_size"
_ONNX = ("onnx", "onnxscript")
# AOTInductor lacks `dynamic_size`, because it computed NaN (torch 2.15). OpenVINO lacks it, because
# with one thread it returned an earlier result for sizes that the file refuses (2026.4).
FORMATS = {
    "onnx": Format(
        (".onnx",),
        _write_onnx,
        open_onnx,
        ("dynamic_size", "int8", "fp16"),
        (*_ONNX, "onnxruntime"),
    ),
    "pt2": Format((".pt2",), _write_pt2, open_pt2, ("dynamic_size", "int8")),
    "aoti": Format((".pt2",), _write_aoti, load_aoti, ("channels_last",)),
    "openvino": Format(
        (".xml", ".bin"),
        _write_openvino,
        open_openvino,
        (),
        (*_ONNX, "openvino"),
        1e-4,
    ),
    "tensorrt": Format(
        (".plan", ".json"),
        _write_tensorrt,
        open_tensorrt,
        ("fp16", "batch_size"),
        (*_ONNX, "tensorrt"),
        1e-4,
    ),
}


def find_format(options: ExportOptions) -> Format:
    """Return the chosen format; raise an error for an unsupported option or a missing package."""
    name = options.format
    for option in _OPTIONS:
        able = [key for key, value in FORMATS.items() if option in value.takes]
        if getattr(options, option) and name not in able:
            raise InputError(f"expected a format out of {listed(able)} with {option}, got {name!r}")
    quantised = options.int8 and name == "pt2"
    packages = ("torchao",) if quantised else FORMATS[name].packages
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        extra = "int8" if quantised else name
        raise MissingDependencyError(to_install(f"format {name!r}", ", ".join(missing), extra))
    if name == "tensorrt" and not torch.cuda.is_available():
        raise InputError("format 'tensorrt' builds a plan on a GPU, and PyTorch sees none")
    return FORMATS[name]
