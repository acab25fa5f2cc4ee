"""What a benchmark of models compares: a model with every setting that changes its speed."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from tyro.conf import Positional, arg

from tresnet.errors import InputError, MissingDependencyError

_MOST = 2**31 - 1  # more images or pixels overflow what PyTorch counts in
_BUILT_WITH = ("norm", "impl", "recompute", "pad", "jit")
_OURS_ALONE = ("norm", "impl", "pad", "jit", "fold")
_TRAINING_ALONE = (
    *("recompute", "grad_checkpointing", "cuda_graph"),
    *("opt", "ema_decay", "clip_grad", "accumulate"),
)
_INFERENCE_ALONE = ("dtype", "fold", "freeze")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseSettings:
    """The settings of a case, named as in train.py, eval.py and `tresnet.create`.

    The text under a field is its help on the command line.
    """

    input_size: int | None = None
    """Side of the square image in pixels; by default each model's own."""
    norm: str | None = None
    """Norm of our models: abn (the default), batchnorm or inplace_abn; others have their own."""
    impl: str | None = None
    """Whose kernels our models run: auto (the default), triton or reference."""
    recompute: str | None = None
    """What backward rebuilds instead of keeping: none, activations (the default of ours) or
    outputs. A compiled model of others takes none (its default) or activations."""
    pad: int | None = None
    """Widen the channels of our models to multiples of this; by default of 8 to train on a GPU and
    to fold."""
    jit: bool = False
    """Run the helper functions of our models as TorchScript."""
    grad_checkpointing: bool = False
    """Compute the activations of whole blocks a second time in backward."""
    fold: bool | None = None
    """Fold batch norms into convolutions, in inference of our models; by default they are."""
    amp: str | None = None
    """Autocast: off, bf16 or fp16 (which scales gradients). By default bf16 to train on a GPU."""
    dtype: str | None = None
    """Type of the weights in inference: fp32, bf16 or fp16. By default bf16 on a GPU."""
    channels_last: bool = False
    """Store images and weights channels last."""
    compile: str = "none"
    """Mode of torch.compile: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs;
    none is eager."""
    freeze: bool = False
    """Compile the weights in as constants, in inference."""
    cuda_graph: bool = False
    """Replay forward and backward of a training step as a CUDA graph."""
    layout_opt: bool = False
    """Compile with Inductor's layout optimisation forced (TORCHINDUCTOR_FORCE_LAYOUT_OPT=1):
    without it PyTorch 2.12 and later may lose channels_last in backward."""
    opt: str = "sgd"
    """Optimizer, by timm's name."""
    ema_decay: float = 0.0
    """Share of the weights' moving average kept at each update; 0 for no average."""
    clip_grad: float | None = None
    """Largest norm of the gradients."""
    accumulate: int = 1
    """Forward and backward passes of an update, each of `batch_size` images."""
    input: str = "float"
    """What a step is fed: float images in [0, 1], or uint8 ones. Our channels-last stem reads bytes
    as they are; others divide by 255 within the step."""


@dataclasses.dataclass(frozen=True)
class BenchCase(CaseSettings):
    """One model and its settings.

    Attributes:
        model: ours, `timm:NAME` or `torchvision:NAME`.
        batch_size: images of a forward pass.
    """

    model: str = ""
    batch_size: int = 64

    @property
    def ours(self) -> bool:
        """Whether the model is one of this package."""
        from tresnet.models.named import split_name

        return split_name(self.model)[0] == "tresnet"

    def checked(self, training: bool, on_gpu: bool = False) -> "BenchCase":
        """The case with every default filled in; one of ours is sure to build and run.

        Raises:
            InputError: a value out of range, an unknown model, an input size it cannot take, or a
                setting that does not apply.
            ConfigError: gradients that the compiler's CUDA graphs would lose.
        """
        from tresnet.models.named import check_name
        from tresnet.steps.optim import training_pad
        from tresnet.steps.training import check_compiled_passes

        check_name(self.model)
        self._check_what_applies(training)
        amp = self.amp or ("bf16" if on_gpu and training else "off")
        dtype = self.dtype or ("bf16" if on_gpu and amp == "off" else "fp32")
        case = dataclasses.replace(
            self,
            pad=training_pad(self.pad, self.opt, on_gpu and training) if self.ours else None,
            amp=amp,
            dtype=None if training else dtype,
            norm=(self.norm or "abn") if self.ours else None,
            fold=False if training or not self.ours else self.fold is not False,
        )
        case._check_values()
        check_compiled_passes(case.compile, case.accumulate)
        if case.ours:
            built = ("model", "input_size", *_BUILT_WITH)
            _rehearse(BenchCase(**{name: getattr(case, name) for name in built}))
        return case

    def _check_what_applies(self, training: bool) -> None:
        where = "inference" if training else "training"
        reasons = dict.fromkeys(
            _INFERENCE_ALONE if training else _TRAINING_ALONE, f"it is for {where}"
        )
        if not self.ours:
            reasons = dict.fromkeys(_OURS_ALONE, "only our models have one") | reasons
        for name, reason in reasons.items():
            value = getattr(self, name)
            if value not in (_DEFAULTS[name], False):
                raise InputError(f"expected no {name} for {self.model}, got {value!r}: {reason}")
        for name in ("freeze", "layout_opt", *(() if self.ours else ("recompute",))):
            value = getattr(self, name)
            if value and self.compile == "none":
                raise InputError(
                    f"expected a compile mode with {name}={str(value).lower()} for {self.model}, "
                    "got none"
                )

    def _check_values(self) -> None:
        from tresnet.models.tresnet import RECOMPUTE
        from tresnet.settings import Amp, CompileMode, Dtype

        choices: dict[str, Sequence[str]] = {
            "amp": typing.get_args(Amp),
            "dtype": typing.get_args(Dtype),
            "compile": typing.get_args(CompileMode),
            "recompute": tuple(RECOMPUTE) if self.ours else ("none", "activations"),
            "input": ("float", "uint8"),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InputError(f"expected {name} out of {', '.join(known)}, got {value!r}")
        for name in ("batch_size", "input_size", "accumulate"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                least = "at least 1" if value < 1 else f"at most {_MOST}"
                raise InputError(f"expected {name.replace('_', ' ')} of {least}, got {value}")
        if not 0 <= self.ema_decay < 1:
            raise InputError(f"expected ema_decay in [0, 1), got {self.ema_decay}")
        if self.clip_grad is not None and not 0 < self.clip_grad < math.inf:
            raise InputError(f"expected clip_grad above 0, got {self.clip_grad}")

    def label(self) -> str:
        """The case in one short line: what differs from the defaults."""
        parts = [self.model, f"batch {self.batch_size}"]
        if self.amp is not None:
            parts.append(self.dtype or "fp32" if self.amp == "off" else f"amp {self.amp}")
        for field in dataclasses.fields(CaseSettings):
            name, value = field.name, getattr(self, field.name)
            usual = value in (None, field.default, False)
            if not usual and name not in ("input_size", "amp", "dtype"):
                parts.append(name if value is True else f"{name} {value}")
        return ", ".join(parts)


_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(CaseSettings)
}


@dataclasses.dataclass(frozen=True)
class Cases(CaseSettings):
    """Models, and the settings that they share unless they have their own."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")] = ()
    """Ours (tresnet_m), timm:NAME or torchvision:NAME. A model may have its own settings, by the
    names of the options: tresnet_m@norm=inplace_abn,amp=fp16 or timm:resnet50@compile=default."""
    batch_sizes: Annotated[tuple[int, ...], arg(name="batch-size")] = (64,)
    """Images a step; several give one case each."""

    def cases(self) -> list[BenchCase]:
        """Every model at every batch size; one with its own `batch_size=` appears once.

        Raises:
            InputError: none, or a setting that cannot be read.
        """
        if not self.models:
            raise InputError("expected at least one model to measure, got none")
        if not self.batch_sizes:
            raise InputError("expected at least one batch size, got none")
        return [
            parse_case(text, self, size)
            for text in self.models
            for size in (self.batch_sizes[:1] if "batch_size=" in text else self.batch_sizes)
        ]


def build(case: BenchCase) -> Any:
    """The model of a case, with random weights, on the CPU.

    Raises:
        MissingDependencyError: norm `inplace_abn` without that package.
    """
    from tresnet.models.named import build_named

    names = _BUILT_WITH if case.ours else ()
    return build_named(case.model, **{name: getattr(case, name) for name in names})


@functools.cache
def _rehearse(case: BenchCase) -> None:
    """Let one of our models complain before anything was measured, not after half an hour."""
    import torch

    from tresnet.measure.macs import without_computing
    from tresnet.models.named import default_input_shape

    with without_computing():
        try:
            model = build(case)
        except MissingDependencyError:  # its row will say so
            return
        size = case.input_size or default_input_shape(model)[-1]
        model.check_input(torch.empty(1, 3, size, size))


def parse_case(text: str, defaults: CaseSettings, batch_size: int = 64) -> BenchCase:
    """`timm:resnet50@compile=default,batch_size=128` to a case; `defaults` gives the rest.

    What only our models have is taken from `defaults` for them alone.

    Raises:
        InputError: an option that is not of the form key=value, an unknown or repeated key, a bad
            value.
    """
    model, _, options = text.partition("@")
    shared = {name: getattr(defaults, name) for name in _DEFAULTS}
    case = BenchCase(model=model, batch_size=batch_size, **shared)
    if not case.ours:
        own = {name: _DEFAULTS[name] for name in (*_OURS_ALONE, "recompute")}
        case = dataclasses.replace(case, **own)
    kinds = {**typing.get_type_hints(CaseSettings), "batch_size": int}
    changes: dict[str, object] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals or key not in kinds:
            raise InputError(
                f"expected MODEL@key=value,... with a key out of {', '.join(kinds)}; got {option!r}"
            )
        if key in changes:
            raise InputError(f"expected {key}= once for {model}, got it again as {option!r}")
        if not value:
            raise InputError(f"expected a value after {key}=, got none")
        kind = next(one for one in _READERS if one in (kinds[key], *typing.get_args(kinds[key])))
        what, read = _READERS[kind]
        try:
            changes[key] = read(value)
        except (ValueError, KeyError):
            raise InputError(f"expected {key}= {what}, got {value!r}") from None
    return dataclasses.replace(case, **changes)


_READERS: dict[type, tuple[str, Callable[[str], object]]] = {
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    int: ("a whole number", int),
    float: ("a number", float),
    str: ("a word", str),
}
