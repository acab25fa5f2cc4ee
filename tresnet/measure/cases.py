"""What a benchmark compares: a case is one model with every setting that changes its speed."""

import dataclasses
import functools
from collections.abc import Sequence

import torch

from tresnet.errors import InputError
from tresnet.measure.macs import without_computing
from tresnet.models.named import (
    build_named,
    check_name,
    default_input_shape,
    split_name,
)
from tresnet.models.tresnet import RECOMPUTE
from tresnet.ops.abn import IMPLS
from tresnet.steps.compiled import TRAINING_PARTITIONER

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASTS = ("autocast", "pure")
INPUTS = ("float", "uint8")
COMPILE_MODES = (
    "none",
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)
NORMS = ("abn", "batchnorm", "inplace_abn")
_MOST = 2**31 - 1  # more images or pixels overflow what PyTorch counts in
# What the compiler's partitioner is told while it divides a step into forward and backward.
PARTITIONERS = {"aggressive": TRAINING_PARTITIONER}


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """One model and its settings.

    Attributes:
        model: ours, `timm:NAME` or `torchvision:NAME`.
        batch_size: images a step.
        input_size: side of the square input in pixels; None takes the model's own.
        dtype: fp32, bf16 or fp16; 16-bit training keeps fp32 weights.
        cast: how a 16-bit dtype is reached: `autocast` (weights fp32, operators choose) or `pure`
            (weights and input converted; inference only). None means autocast in training and pure
            in inference. Without effect for fp32.
        channels_last: memory format of weights and input.
        compile: a mode of torch.compile, or `none` for eager.
        norm: our models' norm, None for `abn`; peers have no choice.
        fold: our model folded by `tresnet.surgery.fold`; inference only.
        freeze: compile the weights in as constants (Inductor's freezing, which packs them for the
            device and fuses activations into convolutions); compiled inference only.
        impl: how our norm `abn` runs: auto, reference, recompute or triton; None leaves the model
            as it was built.
        partitioner: what a compiled training step recomputes in backward: `aggressive` is
            what `tresnet.models.compiled.compile_model` does; None is PyTorch's default.
        pad: our model's channels padded to multiples of 8 (`tresnet.surgery.pad_channels`), which
            `fold` does anyway.
        recompute: what backward rebuilds, as `TResNet.set_recompute` takes it; None leaves the model
            as it was built. Training with our norm `abn` only.
        input: `float` images in [0, 1], or `uint8` ones, as a loader of bytes feeds them. Bytes go into
            our stem as they are where the case is channels_last; else, and for peers, dividing by
            255 is the first thing in the step (and compiled with it).
    """

    model: str
    batch_size: int = 64
    input_size: int | None = None
    dtype: str = "bf16"
    cast: str | None = None
    channels_last: bool = False
    compile: str = "none"
    norm: str | None = None
    fold: bool = False
    freeze: bool = False
    impl: str | None = None
    partitioner: str | None = None
    pad: bool = False
    recompute: str | None = None
    input: str = "float"

    def checked(self, training: bool) -> "BenchCase":
        """The case with `cast` and `norm` filled in; one of ours is sure to build and run.

        Raises:
            InputError: a value out of range, an unknown model, an input size it cannot take, or
                `pure` in training.
            MissingDependencyError: norm `inplace_abn` without the package.
        """
        check_name(self.model)
        ours = split_name(self.model)[0] == "tresnet"
        if self.norm is not None and not ours:
            raise InputError(f"expected no norm for {self.model}, got {self.norm!r}: only ours has")
        self._check_rewrites(training, ours)
        case = dataclasses.replace(
            self,
            cast=self._resolved_cast(training),
            norm=(self.norm or "abn") if ours else None,
        )
        for field, value, choices in (
            ("dtype", case.dtype, tuple(DTYPES)),
            ("compile", case.compile, COMPILE_MODES),
            ("norm", case.norm, NORMS),
            ("impl", case.impl, IMPLS),
            ("partitioner", case.partitioner, tuple(PARTITIONERS)),
            ("input", case.input, INPUTS),
        ):
            if value is not None and value not in choices:
                raise InputError(f"expected {field} out of {', '.join(choices)}, got {value!r}")
        for field, size in (("batch size", case.batch_size), ("input size", case.input_size)):
            if size is not None and not 1 <= size <= _MOST:
                least = "at least 1" if size < 1 else f"at most {_MOST}"
                raise InputError(f"expected {field} of {least}, got {size}")
        case._check_impl()
        case._check_partitioner(training)
        if case.norm is not None:
            _rehearse(case.model, case.norm, case.input_size, case.impl)
        return case

    def _check_impl(self) -> None:
        if self.impl is not None and self.norm != "abn":
            raise InputError(
                f"expected no impl for {self.model} with norm {self.norm}, got {self.impl!r}: "
                "only our norm 'abn' has several"
            )

    def _check_partitioner(self, training: bool) -> None:
        if self.partitioner is not None and (not training or self.compile == "none"):
            raise InputError(
                f"expected a compiled training step with partitioner={self.partitioner} for "
                f"{self.model}, got {'training' if training else 'inference'} with "
                f"compile={self.compile}"
            )

    def _check_rewrites(self, training: bool, ours: bool) -> None:
        if self.recompute is not None:
            if not (training and ours and self.norm in (None, "abn")):
                raise InputError(
                    f"expected no recompute for {self.model}, got {self.recompute!r}: only the norm "
                    "'abn' of ours has a choice, in training"
                )
            if self.recompute not in RECOMPUTE:
                raise InputError(
                    f"expected recompute out of {', '.join(RECOMPUTE)}, got {self.recompute!r}"
                )
        for field in ("fold", "freeze"):
            if training and getattr(self, field):
                raise InputError(f"expected {field}=false in training, got true for {self.model}")
        for field in ("fold", "pad"):
            if getattr(self, field) and not ours:
                raise InputError(
                    f"expected {field}=false for {self.model}, got true: only ours can"
                )
        if self.freeze and self.compile == "none":
            raise InputError(f"expected a compile mode with freeze=true for {self.model}, got none")

    def _resolved_cast(self, training: bool) -> str | None:
        if self.cast is not None and self.cast not in CASTS:
            raise InputError(f"expected cast out of {', '.join(CASTS)}, got {self.cast!r}")
        if self.dtype == "fp32":
            return None
        if training and self.cast == "pure":
            raise InputError(
                "expected cast autocast in training, got 'pure': 16-bit weights lose small updates"
            )
        return self.cast or ("autocast" if training else "pure")

    def label(self) -> str:
        """The case in one short line, for progress and tables."""
        parts = [self.model, f"batch {self.batch_size}", self.dtype]
        if self.input != "float":
            parts.append(f"{self.input} input")
        if self.cast is not None:
            parts.append(self.cast)
        if self.norm is not None:
            parts.append(self.norm)
        if self.impl is not None:
            parts.append(f"impl {self.impl}")
        if self.recompute is not None:
            parts.append(f"recompute {self.recompute}")
        if self.fold:
            parts.append("folded")
        if self.pad:
            parts.append("padded")
        if self.channels_last:
            parts.append("channels_last")
        if self.compile != "none":
            parts.append(f"compile {self.compile}" + (" freeze" if self.freeze else ""))
        if self.partitioner is not None:
            parts.append(f"partitioner {self.partitioner}")
        return ", ".join(parts)


@functools.cache
def _rehearse(model: str, norm: str, input_size: int | None, impl: str | None) -> None:
    """Let one of our models complain before anything was measured, not after half an hour."""
    with without_computing():
        built = build_named(model, norm=norm)
        if impl is not None:
            built.set_impl(impl)  # pyright: ignore[reportCallIssue]
        size = default_input_shape(built)[-1] if input_size is None else input_size
        built.check_input(torch.empty(1, 3, size, size))  # pyright: ignore[reportCallIssue]


def parse_case(text: str, defaults: BenchCase) -> BenchCase:
    """`timm:resnet50@compile=default,batch_size=128` to a case; `defaults` gives the rest.

    The norm of `defaults` is for our models alone.

    Raises:
        InputError: an option that is not of the form key=value, an unknown or repeated key, a bad
            value.
    """
    model, _, options = text.partition("@")
    ours = split_name(model)[0] == "tresnet"
    case = dataclasses.replace(defaults, model=model, norm=defaults.norm if ours else None)
    kinds = {field.name: field.type for field in dataclasses.fields(BenchCase)}
    del kinds["model"]
    changes: dict[str, object] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals or key not in kinds:
            raise InputError(
                f"expected MODEL@key=value,... with a key out of {', '.join(kinds)}; got {option!r}"
            )
        if key in changes:
            raise InputError(f"expected {key}= once for {model}, got it again as {option!r}")
        changes[key] = _parse_value(key, value)
    return dataclasses.replace(case, **changes)


def parse_cases(
    texts: Sequence[str], defaults: BenchCase, batch_sizes: Sequence[int]
) -> list[BenchCase]:
    """Every model at every batch size; a model with its own `batch_size=` appears once."""
    if not batch_sizes:
        raise InputError("expected at least one batch size, got none")
    cases: list[BenchCase] = []
    for text in texts:
        sizes = batch_sizes[:1] if "batch_size=" in text else batch_sizes
        cases += [
            parse_case(text, dataclasses.replace(defaults, batch_size=size)) for size in sizes
        ]
    return cases


def _parse_value(key: str, value: str) -> object:
    if not value:
        raise InputError(f"expected a value after {key}=, got none")
    if key in ("batch_size", "input_size"):
        if not (value.isascii() and value.isdigit() and len(value) < 20):
            raise InputError(f"expected {key}= a whole number, got {value!r}")
        return int(value)
    if key in ("channels_last", "fold", "freeze", "pad"):
        if value not in ("true", "false"):
            raise InputError(f"expected {key}=true or false, got {value!r}")
        return value == "true"
    return value
