"""Each format: how a traced model is written, and how the file is opened and run.

A writer gets a path that ends as the format's files do; what it writes is checked by the caller.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from tresnet.errors import ExportError, InputError, MissingDependencyError
from tresnet.export.aoti import load_aoti
from tresnet.export.images import Images
from tresnet.export.plain import trace

METADATA_KEY = "tresnet"
Run = Callable[[Tensor], Tensor]


class Job(NamedTuple):
    """What a writer needs.

    Attributes:
        program: the traced model.
        images: what it takes.
        metadata: told to those who open the file; plain values.
        calibration: batches as the model takes them, for the ranges of 8-bit values; else None.
    """

    program: ExportedProgram
    images: Images
    metadata: dict[str, Any]
    calibration: Sequence[Tensor] | None


class Format(NamedTuple):
    """A format.

    Attributes:
        suffixes: of the files; the first is that of the path users name.
        packages: what writing and checking import besides torch.
        extra: of this package, which installs them.
        limit: largest difference of logits, as a share of the largest one and of 1.
        write: writes a job to a path.
        open: opens that path to run it.
        int8: whether it can be quantised.
    """

    suffixes: tuple[str, ...]
    packages: tuple[str, ...]
    extra: str
    limit: float
    write: Callable[[Job, Path], None]
    open: Callable[[Path], Run]
    int8: bool = False


def _write_onnx(job: Job, path: Path) -> None:
    floats = path.with_stem("floats") if job.calibration is not None else path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about its own parts
        made = torch.onnx.export(
            job.program,
            input_names=["images"],
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    assert made is not None, "nothing is returned where a path is given alone"
    made.model.metadata_props.update(_texts(job.metadata))
    made.save(floats, external_data=False)
    if job.calibration is not None:
        _quantise_onnx(job, floats, path)


def _quantise_onnx(job: Job, floats: Path, path: Path) -> None:
    """8-bit weights and activations, their ranges those seen in the calibration images."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    assert job.calibration is not None
    batches = ({"images": batch.numpy()} for batch in job.calibration)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, Any] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
            return next(batches, None)

    prepared = path.with_stem("prepared")
    quant_pre_process(floats, prepared, skip_symbolic_shape=True)
    quantization.quantize_static(
        prepared,
        path,
        Reader(),
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, _texts(job.metadata))
    onnx.save(model, path)


def open_onnx(path: Path, threads: int | None = None) -> Run:
    """An ONNX file in onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def _write_pt2(job: Job, path: Path) -> None:
    program = job.program if job.calibration is None else _quantise_pt2(job)
    torch.export.save(program, path, extra_files={METADATA_KEY: json.dumps(job.metadata)})
    example = job.images.prepare(job.images.random(3, job.images.height, job.images.width))
    with torch.inference_mode():
        if not torch.equal(open_pt2(path)(example), program.module()(example)):
            raise ExportError("expected the same bits from the program that was read back")


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
        warnings.simplefilter("ignore")  # of torchao about its own parts
        observed = prepare_pt2e(job.program.module(), quantizer)
        for batch in job.calibration:
            observed(batch)
        made = convert_pt2e(observed)
        # Made anew, it holds what its graph uses, not the 32-bit weights beside the 8-bit ones.
        made = torch.fx.GraphModule(made, made.graph)
        return trace(made, job.images, torch.device("cpu"))


def open_pt2(path: Path) -> Run:
    """An exported program, run operator by operator."""
    with contextlib.suppress(ImportError):  # it names the operators of an 8-bit program
        import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401
    return torch.export.load(path).module()


def _write_aoti(job: Job, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package, config

    settings: dict[str, Any] = {"aot_inductor.metadata": _texts(job.metadata)}
    # PyTorch takes any number of images for at least 2, and so would refuse one, where it checks.
    for name in ("check_lowerbound", "check_upperbound"):
        if hasattr(config.aot_inductor, name):
            settings[f"aot_inductor.{name}"] = False
    aoti_compile_and_package(job.program, package_path=str(path), inductor_configs=settings)


def _write_openvino(job: Job, path: Path) -> None:
    import openvino

    source = path.with_suffix(".onnx")
    _write_onnx(job, source)
    model = openvino.convert_model(source)
    for key, text in _texts(job.metadata).items():
        model.set_rt_info(text, [METADATA_KEY, key])
    openvino.save_model(model, path, compress_to_fp16=False)


def open_openvino(path: Path, threads: int | None = None, precision: str = "f32") -> Run:
    """An OpenVINO file on the CPU; `precision` is 'f32', 'bf16' or 'f16'."""
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": precision,  # 16 bits where the CPU has them, by default
        "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
    }
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return lambda x: torch.from_numpy(compiled([x.numpy()])[0].copy())


def _texts(metadata: dict[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in metadata.items()}


FORMATS = {
    "onnx": Format(
        (".onnx",),
        ("onnx", "onnxscript", "onnxruntime"),
        "onnx",
        1e-5,
        _write_onnx,
        open_onnx,
        True,
    ),
    "pt2": Format((".pt2",), (), "int8", 1e-5, _write_pt2, open_pt2, True),
    "aoti": Format((".pt2",), (), "", 1e-5, _write_aoti, load_aoti),
    "openvino": Format(
        (".xml", ".bin"),
        ("onnx", "onnxscript", "openvino"),
        "openvino",
        1e-4,
        _write_openvino,
        open_openvino,
    ),
}


def find_format(name: str, int8: bool) -> Format:
    """The format of that name, with all that it needs installed.

    Raises:
        InputError: there is none, or it has no 8-bit form.
        MissingDependencyError: a package is not installed; gives the command that installs it.
    """
    import importlib.util

    if name not in FORMATS:
        raise InputError(f"expected a format out of {', '.join(FORMATS)}, got {name!r}")
    found = FORMATS[name]
    if int8 and not found.int8:
        able = ", ".join(key for key, value in FORMATS.items() if value.int8)
        raise InputError(f"expected a format out of {able} with int8, got {name!r}")
    packages = ("torchao",) if int8 and name == "pt2" else found.packages
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingDependencyError(
            f"format {name!r} needs {', '.join(missing)}, not installed: pip install "
            f"'tresnet[{found.extra}]' (from a checkout: pip install -e '.[{found.extra}]')"
        )
    return found
