"""Parse and check a benchmark's cases: models with all settings that affect their speed."""

import dataclasses
import functools
from typing import Annotated, Any

from tyro.conf import Positional, arg

from tresnet.errors import InputError, MissingDependencyError
from tresnet.settings import (
    Build,
    Capability,
    ModelStep,
    Recompute,
    check_compiled_accumulation,
    sides,
)
from tresnet.settings.fields import Positive, Size, check, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseSettings(ModelStep):
    """Settings of a case. None means that the model determines the value."""

    # Unlike in `ModelStep`, this field may be None.
    recompute: Recompute | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Tensors that backward recomputes: none, or activations (the default of our models). Other
    models take it only if compiled, and their default is none."""
    lr: Positive = 1e-3
    """Learning rate: small, so that the timed steps do not diverge."""
    layout_opt: bool = False
    """Force Inductor's layout optimisation (TORCHINDUCTOR_FORCE_LAYOUT_OPT=1). Without this option,
    PyTorch 2.12 and later may lose channels_last in backward."""


@dataclasses.dataclass(frozen=True)
class BenchCase(CaseSettings):
    """One model (ours, `timm:NAME` or `torchvision:NAME`) and its settings."""

    model: str = ""
    batch_size: Size = 64

    @property
    def ours(self) -> bool:
        from tresnet.checkpoints.named import split_name

        return split_name(self.model)[0] == "tresnet"

    def checked(self, training: bool, capability: Capability | None = None) -> "BenchCase":
        """Return the case with all defaults filled in; `capability` is None for a CPU."""
        import torch

        from tresnet.checkpoints.named import check_name
        from tresnet.steps.optim import create_optimizer

        check_name(self.model)
        check(self, InputError)
        self.check_applies(training=training, model=self.model, ours=self.ours)
        self._check_compiler()
        fold = self.fold and self.ours and not training
        case = dataclasses.replace(self, fold=fold).decided(capability)
        check_compiled_accumulation(case.compile, case.accumulate)
        if training:
            create_optimizer([{"params": [torch.ones(1, requires_grad=True)]}], case, 1)
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

    def columns(self) -> dict[str, Any]:
        """Return the settings as columns of a record; None for settings that the model lacks."""
        row = dataclasses.asdict(self)
        return row if self.ours else row | dict.fromkeys(self.values(Build))

    def label(self, training: bool) -> str:
        """Return one short line: model, batch size, and settings that differ from the defaults."""
        precision = self.dtype if self.amp == "off" else f"amp {self.amp}"
        parts = [self.model, f"batch {self.batch_size}", precision]
        elsewhere = {"input_size", "amp", "dtype", *(["fold"] if training or not self.ours else [])}
        for field in dataclasses.fields(CaseSettings):
            name, value = field.name, getattr(self, field.name)
            if value not in (None, field.default) and name not in elsewhere:
                shown = {True: name, False: f"no {name}"} if isinstance(value, bool) else {}
                parts.append(shown.get(value, f"{name} {value}"))
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cases(CaseSettings):
    """Models to measure, and settings for each model that does not set its own."""

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL [MODEL ...]")] = ()
    """Model of this package (tresnet_m), timm:NAME or torchvision:NAME. A model's own settings are
    named like options: tresnet_m@norm=inplace_abn,amp=fp16 or timm:resnet50@compile=default."""
    batch_size: tuple[Size, ...] = (64,)
    """Images per micro-batch. If several values are given, each value makes a case of its own."""

    def cases(self) -> list[BenchCase]:
        """Return a case for every model and batch size; a malformed model raises `InputError`."""
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
    """Build a case's model; raise `MissingDependencyError` if its norm's package is missing."""
    from tresnet.checkpoints.named import build_named

    return build_named(case.model, device=device, **(case.build if case.ours else {}))


@functools.cache
def _rehearse(case: BenchCase) -> None:
    """Build one of our models without data, so that errors are raised before any measurement."""
    import torch

    from tresnet.checkpoints.named import default_input_shape

    try:
        model = build(case, "meta")
    except MissingDependencyError:  # the row of the record will report this
        return
    size = case.input_size or default_input_shape(model)[-1]
    model.check_input(torch.empty(1, 3, *sides(size), device="meta"))


def parse_case(text: str, defaults: CaseSettings, batch_size: int = 64) -> BenchCase:
    """Parse a case, such as `timm:resnet50@amp=fp16`; `defaults` and `batch_size` give the rest."""
    model, _, options = text.partition("@")
    settings: dict[str, str] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if not value or key == "model":
            raise InputError(f"expected MODEL@key=value,... such as @amp=bf16, got {option!r}")
        if key in settings:
            raise InputError(f"expected {key}= once for {model}, got it again as {option!r}")
        settings[key] = value
    own = parse(BenchCase, settings, model)
    case = BenchCase(model, batch_size, **defaults.values(CaseSettings))
    if not case.ours:  # drop those `defaults` that are meant only for our models
        plain = BenchCase()
        names = {*plain.values(Build), "fold", "recompute"}
        case = dataclasses.replace(case, **{name: getattr(plain, name) for name in names})
    return dataclasses.replace(case, **{name: getattr(own, name) for name in settings})
