"""The Triton kernels of a model's steps, compiled ahead of time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tresnet.errors import InputError
from tresnet.memory.device import find_device
from tresnet.memory.plan import make_plan
from tresnet.memory.prediction import record
from tresnet.memory.workspaces import Workspaces
from tresnet.ops.operators import noted


def warm(
    model: str,
    *,
    target: str | None = None,
    processes: int | None = None,
    infer: bool = False,
    say: Callable[[str], object] = lambda line: None,
    **settings: Any,
) -> int:
    """Compile all kernels of a training step and of the evaluation in between, or of an inference.

    The step runs on fake tensors, as for `tresnet.memory.predict`; what it would launch goes into
    Triton's cache (`TRITON_CACHE_DIR`), where the first real step finds it.

    Args:
        model: by name; one of ours.
        target: such as `sm_90`, in place of this machine's GPU.
        processes: that compile; by default one a core.
        infer: inference, with its `dtype` and `fold`.
        say: told how many there are.
        **settings: of the step, as `tresnet.memory.predict` takes them.

    Returns:
        How many kernels there are now.

    Raises:
        InputError: a setting does not fit, nothing to compile for, or a model without kernels.
    """
    try:
        from tresnet.ops import ahead
    except ImportError:
        raise InputError("expected the triton package, got none: install it") from None
    found = ahead.find_target(target)
    _, module, plan = make_plan(model, train=not infer, **settings)
    plans = [plan]
    if not infer:  # train.py evaluates the model as it is, on bytes
        plans.append(replace(plan, train=False, fold=False, input="uint8"))
    with noted() as launches:
        for plan in plans:
            record(module, plan, find_device(None, None), Workspaces())
    wanted = ahead.specialisations(launches, found)
    if not wanted:
        raise InputError(
            f"expected a model that runs our kernels, got {model}: take one of ours, impl='auto'"
        )
    say(f"compiling {len(wanted)} kernels for {found.backend} {found.arch}")
    ahead.compile_all(wanted, found, processes)
    return len(wanted)
