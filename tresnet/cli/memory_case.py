"""One measured case, in a process of its own so that nothing is left over from another.

Started by `tresnet memory measure` and `compare` as `python -m tresnet.cli.memory_case JSON`; prints
one JSON object on stdout.
"""

import dataclasses
import json
import sys
from typing import Any

from tresnet.errors import InputError, TResNetError

TENSOR_CASE = "tensor"
# Two steps reach the peak; the others let cuDNN and the cache settle.
_STEPS = 5


@dataclasses.dataclass(frozen=True)
class MemoryCase:
    """What to measure: a subject or a model by name, and the arguments of `memory.predict`.

    Attributes:
        name: a subject of the study (`tensor`, `cnn`, ...), or a model's name.
        step: keyword arguments of the step, plain values only; a subject brings its own.
        model_options: keyword arguments for a model given by name.
        device: such as cuda or cpu.
        steps: steps to run.
    """

    name: str
    step: dict[str, Any] = dataclasses.field(default_factory=dict)
    model_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: str = "cuda"
    steps: int = _STEPS


def measure(case: MemoryCase) -> dict[str, dict[str, float | None]]:
    """Run a case here and now: the memory columns at every phase, in MiB.

    Raises:
        InputError: there is no such case or no such device.
    """
    import torch

    if torch.device(case.device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"expected a GPU for device {case.device!r}, found none: measure on a machine with "
            "one, or check that the command runs with --device cpu"
        )
    if case.name == TENSOR_CASE:
        return _measure_tensor(case.device)
    return _measure_model(case)


def _measure_model(case: MemoryCase) -> dict[str, dict[str, float | None]]:
    from tresnet.measure.memory import MemoryMeter
    from tresnet.memory.models import find_model
    from tresnet.memory.plan import make_plan
    from tresnet.memory.real import RealMachine
    from tresnet.memory.step import start
    from tresnet.memory.subjects import SUBJECTS

    subject = SUBJECTS.get(case.name)
    if subject is not None:
        model = subject.build()
        plan = make_plan(model, **{**subject.step, **case.step})
    else:
        model = find_model(case.name, case.model_options)[1]
        plan = make_plan(model, **case.step)
        model = _with_values(model)
    machine = RealMachine(case.device)
    meter = MemoryMeter(case.device, log=lambda line: None)
    meter.phase("initial")
    placed = machine.place(model, plan)
    meter.phase("model")
    run = start(placed, plan, machine)
    for _ in range(case.steps):
        run.step()
    meter.phase("train")
    meter.phase("final")
    return {name: snapshot.to_dict() for name, snapshot in meter.phases.items()}


def _with_values(model: Any) -> Any:
    """A model built without data, with zeros in it: what they are does not matter to memory."""
    import torch

    if any(p.device.type == "meta" for p in model.parameters()):
        model = model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
    return model


def _measure_tensor(device: str) -> dict[str, dict[str, float | None]]:
    """The study's first subject: a tensor of 1 GiB is defined, deleted, released."""
    import torch

    from tresnet.measure.memory import MemoryMeter
    from tresnet.memory.subjects import TENSOR_BYTES

    meter = MemoryMeter(device)
    meter.reset_peak()
    phases = {"initial": meter.snapshot()}
    tensor = torch.empty(TENSOR_BYTES // 4, dtype=torch.float32, device=device)
    phases["define"] = meter.snapshot()
    del tensor
    phases["delete"] = meter.snapshot()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    phases["release"] = meter.snapshot()
    return {name: snapshot.to_dict() for name, snapshot in phases.items()}


def measure_in_new_process(case: MemoryCase, timeout_s: float) -> dict[str, Any]:
    """Run a case in a fresh process: its phases, or `{'error': ...}` with what went wrong."""
    import subprocess

    command = [
        sys.executable,
        "-m",
        "tresnet.cli.memory_case",
        json.dumps(dataclasses.asdict(case)),
    ]
    try:
        done = subprocess.run(  # the interpreter that runs us, with our own arguments
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return {"phases": json.loads(lines[-1])}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": f"exit code {done.returncode}: {last}"}


def main() -> int:
    """Measure the case given as JSON; 2 for a case that cannot be."""
    from tresnet.cli.output import fail, say

    case = MemoryCase(**json.loads(sys.argv[1]))
    for key in ("input_size", "target_size", "checkpointing"):
        if isinstance(case.step.get(key), list):
            case.step[key] = tuple(case.step[key])
    try:
        say(json.dumps(measure(case)))
    except TResNetError as error:
        fail(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
