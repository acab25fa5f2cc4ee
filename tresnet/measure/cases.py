"""Cases of a benchmark of models: a model with every setting that changes its speed.

A case is written `MODEL@key=value,...` on the command line. `Cases` parses all of them with their
common options, and `BenchCase.checked` fills in the defaults of model and device.
"""

import dataclasses
import functools
from typing import Annotated, Any

from tyro.conf import Positional, arg

from tresnet.errors import InputError, MissingDependencyError
from tresnet.settings import Amp, Build, Dtype, ModelStep, Recompute, sides
from tresnet.settings.fields import Positive, Size, check, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseSettings(ModelStep):
    """Settings of a case. None leaves the choice to the model and the device."""

    # None is allowed here, as there is no recipe that decides.
    amp: Amp | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Autocast; fp16 scales the loss in training. By default bf16 to train on a GPU."""
    dtype: Dtype | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Type of the weights in inference. By default bf16 on a GPU, unless --amp is given."""
    recompute: Recompute | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Tensors that backward recomputes: none, activations (the default of our models) or outputs.
    Other models accept none (their default) or activations, if compiled."""
    lr: Positive = 1e-3
    """Learning rate: small, so that the timed steps do not diverge."""
    layout_opt: bool = False
    """Compile with Inductor's layout optimisation forced (TORCHINDUCTOR_FORCE_LAYOUT_OPT=1):
    without it PyTorch 2.12 and later may lose channels_last in backward."""


@dataclasses.dataclass(frozen=True)
class BenchCase(CaseSettings):
    """One model (ours, `timm:NAME` or `torchvision:NAME`) and its settings."""

    model: str = ""
    batch_size: Size = 64

    @property
    def ours(self) -> bool:
        """Whether the model is one of this package."""
        from tresnet.models.named import split_name

        return split_name(self.model)[0] == "tresnet"

    def checked(self, training: bool, on_gpu: bool = False) -> "BenchCase":
        """Return the case with defaults filled in, or raise an error if a setting does not fit."""
        from tresnet.models.named import check_name
        from tresnet.steps.training import check_compiled_accumulation

        check_name(self.model)
        check(self, InputError)
        self.check_applies(training=training, model=self.model, ours=self.ours)
        self._check_compiler()
        amp = self.amp or ("bf16" if on_gpu and training else "off")
        dtype = self.dtype or ("bf16" if on_gpu and amp == "off" else "fp32")
        case = dataclasses.replace(
            self,
            amp=amp,
            dtype=None if training else dtype,
            fold=self.fold and self.ours and not training,
        )
        check_compiled_accumulation(case.compile, case.accumulate)
        if case.ours:
            _rehearse(BenchCase(case.model, input_size=case.input_size, **case.build))
        return case

    def _check_compiler(self) -> None:
        for name in ("freeze", "layout_opt", *(() if self.ours else ("recompute",))):
            value = getattr(self, name)
            if value and self.compile == "none":
                raise InputError(
                    f"expected a compile mode with {name}={str(value).lower()} for {self.model}, "
                    "got none"
                )
        if self.recompute == "outputs" and not self.ours:
            raise InputError(
                f"expected recompute none or activations for {self.model}, got 'outputs'"
            )

    def columns(self) -> dict[str, Any]:
        """Return the columns of a record; None for settings that other models than ours lack."""
        row = dataclasses.asdict(self)
        return row if self.ours else row | dict.fromkeys(self.values(Build))

    def label(self) -> str:
        """Return the model and its settings that differ from the defaults, in one short line."""
        parts = [self.model, f"batch {self.batch_size}"]
        if self.amp is not None:
            parts.append(self.dtype or "fp32" if self.amp == "off" else f"amp {self.amp}")
        elsewhere = {"input_size", "amp", "dtype"}
        if self.dtype is None or not self.ours:  # in training, and for others, nothing is folded
            elsewhere.add("fold")
        for field in dataclasses.fields(CaseSettings):
            name, value = field.name, getattr(self, field.name)
            if value not in (None, field.default) and name not in elsewhere:
                shown = {True: name, False: f"no {name}"} if isinstance(value, bool) else {}
                parts.append(shown.get(value, f"{name} {value}"))
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cases(CaseSettings):
    """Models, and the common settings of those that have none of their own."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")] = ()
    """Ours (tresnet_m), timm:NAME or torchvision:NAME. A model may have its own settings, by the
    names of the options: tresnet_m@norm=inplace_abn,amp=fp16 or timm:resnet50@compile=default."""
    batch_size: tuple[Size, ...] = (64,)
    """Images of a micro-batch; several give one case each."""

    def cases(self) -> list[BenchCase]:
        """Return a case for every model and batch size; `InputError` if one cannot be read."""
        if not self.models:
            raise InputError("expected at least one model to measure, got none")
        if not self.batch_size:
            raise InputError("expected at least one batch size, got none")
        return [
            parse_case(text, self, size)
            for text in self.models
            for size in (self.batch_size[:1] if "batch_size=" in text else self.batch_size)
        ]


def build(case: BenchCase, device: str = "cpu") -> Any:
    """Build a case's model; norm `inplace_abn` raises `MissingDependencyError` without it."""
    from tresnet.models.named import build_named

    return build_named(case.model, device=device, **(case.build if case.ours else {}))


@functools.cache
def _rehearse(case: BenchCase) -> None:
    """Create one of our models without data, so that its errors appear before the measurements."""
    import torch

    from tresnet.models.named import default_input_shape

    try:
        model = build(case, "meta")
    except MissingDependencyError:  # its row will say so
        return
    size = case.input_size or default_input_shape(model)[-1]
    model.check_input(torch.empty(1, 3, *sides(size), device="meta"))


def parse_case(text: str, defaults: CaseSettings, batch_size: int = 64) -> BenchCase:
    """Read `timm:resnet50@compile=default`; `defaults` has the other settings of the model."""
    model, _, options = text.partition("@")
    given: dict[str, str] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if not value or key == "model":
            raise InputError(f"expected MODEL@key=value,... such as @amp=bf16, got {option!r}")
        if key in given:
            raise InputError(f"expected {key}= once for {model}, got it again as {option!r}")
        given[key] = value
    own = parse(BenchCase, given, model)
    case = BenchCase(model, batch_size, **defaults.values(CaseSettings))
    if not case.ours:
        plain = BenchCase()
        names = {*plain.values(Build), "fold", "recompute"}
        case = dataclasses.replace(case, **{name: getattr(plain, name) for name in names})
    return dataclasses.replace(case, **{name: getattr(own, name) for name in given})
