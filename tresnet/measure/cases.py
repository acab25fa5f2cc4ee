"""Cases of a benchmark: models with all settings that affect their speed, parsed and checked."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any

from typing_extensions import Doc
from tyro.conf import Positional, Suppress, arg

from tresnet.errors import InputError, MissingDependencyError
from tresnet.settings import (
    Build,
    Capability,
    Input,
    InputSize,
    ModelStep,
    OptimConfig,
    Sides,
    TrainingBuild,
    sides,
)
from tresnet.settings.fields import Settings, Size, changed, check, flatten, parse, replace


def _default_step() -> ModelStep:
    # At a small learning rate, the timed steps do not diverge.
    return ModelStep(build=TrainingBuild(recompute=None), optim=OptimConfig(lr=1e-3))


Models = Annotated[
    Positional[tuple[str, ...]],
    arg(metavar="MODEL [MODEL ...]"),
    Doc(
        "Model of this package (tresnet_m), timm:NAME or torchvision:NAME. After an @, options"
        " apply to one model: tresnet_m@norm=inplace_abn,amp=fp16 or timm:resnet50@compile=default."
    ),
]
BatchSizes = Annotated[
    tuple[Size, ...],
    Doc("Images per micro-batch. With several values, each model is measured at every value."),
]
LayoutOpt = Annotated[
    bool,
    Doc(
        "Force Inductor's layout optimisation (TORCHINDUCTOR_FORCE_LAYOUT_OPT=1). Without this"
        " option, PyTorch 2.12 and later may lose channels_last in backward."
    ),
]


@dataclasses.dataclass(frozen=True)
class BenchCase(Settings):
    """All models' settings."""

    model: Suppress[str] = ""  # of this package, timm:NAME or torchvision:NAME
    batch_size: Suppress[Size] = 64
    step: ModelStep = dataclasses.field(default_factory=_default_step)
    input_size: InputSize = None
    input: Input = "float"
    layout_opt: LayoutOpt = False

    @property
    def ours(self) -> bool:
        from tresnet.peers import split_name

        return split_name(self.model)[0] == "tresnet"

    def checked(self, training: bool, capability: Capability | None = None) -> "BenchCase":
        """Return the case, checked and with defaults filled in; `capability` is None on a CPU."""
        import torch

        from tresnet.peers import check_name
        from tresnet.steps.compiled import check_compiled_accumulation
        from tresnet.steps.optim import create_optimizer

        check_name(self.model)
        check(self, InputError)
        step = self.step
        step.check_used(_default_step(), training=training, model=self.model, ours=self.ours)
        needing: dict[str, Any] = {"freeze": step.compute.freeze, "layout_opt": self.layout_opt}
        if not self.ours:
            needing["recompute"] = step.build.recompute
        for name, value in needing.items():
            if value and step.compute.compile == "none":
                raise InputError(
                    f"expected a compile mode with {name}={str(value).lower()} for {self.model}, "
                    "got none"
                )
        fold = step.compute.fold and self.ours and not training
        compute = dataclasses.replace(step.compute, fold=fold).decided(capability)
        check_compiled_accumulation(compute.compile, step.optim.accumulate)
        if training:
            create_optimizer([{"params": [torch.ones(1, requires_grad=True)]}], step.optim, 1)
        if self.ours:
            _check_build(self.model, self.input_size, step.build)
        return dataclasses.replace(self, step=dataclasses.replace(step, compute=compute))

    def columns(self) -> dict[str, Any]:
        """Return the settings as columns of a record; settings that the model lacks are None."""
        row = flatten(self)
        return row if self.ours else row | dict.fromkeys(vars(Build()))

    def label(self, training: bool) -> str:
        """Describe the case in a line: model, batch size, settings that differ from defaults."""
        compute, unset = self.step.compute, BenchCase(self.model, self.batch_size)
        precision = compute.dtype if compute.amp == "off" else f"amp {compute.amp}"
        parts = [self.model, f"batch {self.batch_size}", precision]
        omitted = {"input_size", "amp", "dtype", *(["fold"] if training or not self.ours else [])}
        for name, value in changed(self, unset).items():
            if value is not None and name not in omitted:
                shown = {True: name, False: f"no {name}"} if isinstance(value, bool) else {}
                parts.append(shown.get(value, f"{name} {value}"))
        return ", ".join(parts)


def build(case: BenchCase) -> Any:
    """Build a case's model; raise `MissingDependencyError` if the norm needs a missing package."""
    from tresnet.peers import build_named

    return build_named(case.model, device="cpu", **(case.step.build.options if case.ours else {}))


@functools.cache
def _check_build(name: str, size: Sides | None, settings: TrainingBuild) -> None:
    """Build the model on the meta device, so that errors are raised before any measurement."""
    import torch

    from tresnet.peers import build_named, default_input_shape

    try:
        model: Any = build_named(name, device="meta", **settings.options)
    except MissingDependencyError:  # the case's row of the record will report this error
        return
    size = size or default_input_shape(model)[-1]
    model.check_input(torch.empty(1, 3, *sides(size), device="meta"))


def parse_cases(
    models: Sequence[str], batch_sizes: Sequence[int], defaults: BenchCase
) -> list[BenchCase]:
    """Return a case for every model and batch size; a malformed model raises `InputError`."""
    if not models:
        raise InputError("expected at least one model to measure, got none")
    if not batch_sizes:
        raise InputError("expected at least one batch size, got none")
    return [
        parse_case(text, dataclasses.replace(defaults, batch_size=size))
        for text in models
        for size in (batch_sizes[:1] if "batch_size=" in text else batch_sizes)
    ]


def parse_case(text: str, defaults: BenchCase) -> BenchCase:
    """Parse `text`, such as `timm:resnet50@amp=fp16`; settings in `text` override `defaults`."""
    model, _, options = text.partition("@")
    settings: dict[str, str] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if not value or key == "model":
            raise InputError(f"expected MODEL@key=value,... such as @amp=bf16, got {option!r}")
        if key in settings:
            raise InputError(f"expected {key}= once for {model}, got another {option!r}")
        settings[key] = value
    own = parse(BenchCase, settings, model)
    case = dataclasses.replace(defaults, model=model)
    if not case.ours:  # reset the settings that apply only to models of this package
        case = replace(case, **vars(Build()), fold=True, recompute=None)
    return replace(case, **own)
