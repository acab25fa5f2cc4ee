"""The matrix of cases that the predictor is held to: our models and peers in every usual setting."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tresnet.cli.memory_case import MemoryCase
from tresnet.cli.memory_options import RECORDS
from tresnet.errors import InputError

if TYPE_CHECKING:
    from tresnet.memory import Device, Workspaces

OURS = ("tresnet_t", "tresnet_s", "tresnet_m", "tresnet_l", "tresnet_xl", "tresnet_v2_l")
PEERS = (
    "timm:resnet50",
    "timm:seresnext50_32x4d",
    "timm:tresnet_m",
    "timm:densenet121",
    "timm:efficientnet_b0",
    "timm:mobilenetv3_large_100",
    "timm:regnety_032",
    "timm:nf_resnet50",
    "timm:convnext_tiny",
    "timm:vit_small_patch16_224",
    "timm:swin_tiny_patch4_window7_224",
    "timm:vgg16_bn",
)
BATCH_SIZE = 64
# What the predictor is held to, in percent of what was measured.
ALLOCATED_MEAN_PERCENT = 2.0
ALLOCATED_PERCENT = 5.0
RESERVED_PERCENT = 10.0

_OPTIMIZERS = ("sgd_momentum", "adamw")
_PRECISIONS = (None, "bf16")


def matrix_cases(models: Sequence[str] = (), device: str = "cuda") -> list[MemoryCase]:
    """The cases, or those of the models named.

    Ours train in fp32 and bf16, each with SGD and momentum and with AdamW, and infer in both; the
    optimizer does not exist in inference. Peers train in fp32 with SGD and in bf16 with AdamW.

    Raises:
        InputError: a model that is not in the matrix.
    """
    unknown = [name for name in models if name not in (*OURS, *PEERS)]
    if unknown:
        raise InputError(
            f"expected models of the matrix ({', '.join((*OURS, *PEERS))}), got {unknown[0]!r}"
        )
    cases = [
        *(
            _case(name, device, amp, optimizer)
            for name in OURS
            for amp in _PRECISIONS
            for optimizer in (*_OPTIMIZERS, None)
        ),
        *(
            _case(name, device, amp, optimizer)
            for name in PEERS
            for amp, optimizer in zip(_PRECISIONS, _OPTIMIZERS, strict=True)
        ),
    ]
    return [case for case in cases if not models or case.name in models]


def label(case: MemoryCase) -> str:
    """`train bf16 adamw`, in a table."""
    kind = f"train {case.step['optimizer']}" if case.step["train"] else "infer"
    return f"{kind} {case.step['amp'] or 'fp32'}"


def _case(name: str, device: str, amp: str | None, optimizer: str | None) -> MemoryCase:
    """One case; no optimizer is inference."""
    step = {"batch_size": BATCH_SIZE, "train": optimizer is not None, "amp": amp}
    return MemoryCase(name, {**step, "optimizer": optimizer or "sgd"}, device=device)


def compare_matrix(
    cases: Sequence[MemoryCase],
    measure: Callable[[MemoryCase], dict[str, Any]],
    workspaces: "Workspaces | None" = None,
) -> list[dict[str, Any]]:
    """One row a case: measured, predicted, and the errors.

    Cases are measured one after another in their own processes, while this one predicts.

    Args:
        cases: what to compare.
        measure: gives a case's `phases`, or `error` with what went wrong.
        workspaces: a measured table for the predictions.
    """
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    try:
        measuring = [pool.submit(measure, case) for case in cases]
        rows = []
        for case, future in zip(cases, measuring, strict=True):
            predicted = predict_row(case.name, case.model_options, case.step, None, workspaces)
            rows.append(_row(case, future.result(), predicted))
        return rows
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def predict_row(
    name: str,
    model_options: Mapping[str, Any],
    step: Mapping[str, Any],
    device: "Device | None",
    workspaces: "Workspaces | None" = None,
) -> dict[str, float]:
    """What a row says of a prediction."""
    from tresnet.memory import predict

    predicted = predict(
        name, model_options=dict(model_options), device=device, workspaces=workspaces, **step
    )
    return {
        "allocated_mib": predicted.allocated.mib,
        "reserved_mib": predicted.reserved.mib,
        "device_total_mib": predicted.device_total.mib,
        "seconds": predicted.seconds,
    }


def predict_again(
    record: Mapping[str, Any], models: Collection[str] | None = None, folder: Path | None = None
) -> list[dict[str, Any]]:
    """The measured rows of a record with the predictions of today, for the record's GPU.

    Args:
        record: what `memory compare --matrix` wrote.
        models: those to predict; None for all.
        folder: where the record's table of workspaces lies, if it names one.
    """
    from tresnet.memory import Workspaces, describe_device

    gpu = record["environment"]["device"]
    major, minor = map(int, gpu["compute_capability"].split("."))
    device = describe_device(gpu["name"], int(gpu["memory_mib"] * 2**20), (major, minor))
    table = record["settings"].get("workspaces")
    workspaces = Workspaces.load((folder or RECORDS) / table) if table else None
    rows = []
    for row in record["rows"]:
        if row["measured"] is None or (models is not None and row["name"] not in models):
            continue
        predicted = predict_row(row["name"], row["model_options"], row["step"], device, workspaces)
        rows.append({**row, "predicted": predicted, **_errors(row["measured"], predicted)})
    return rows


def misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where predictions miss measurements by more than they may, in words: at most the bounds."""
    found = []
    mean = mean_error_percent(rows)
    if mean is not None and mean > ALLOCATED_MEAN_PERCENT:
        found.append(f"allocated: mean error {mean:.2f} %, expected {ALLOCATED_MEAN_PERCENT} %")
    limits = {"allocated": ALLOCATED_PERCENT, "reserved": RESERVED_PERCENT}
    for row in rows:
        for what, limit in limits.items():
            error = row[f"{what}_error_percent"]
            if error is not None and abs(error) > limit:
                found.append(
                    f"{row['name']} {row['step']}: {what} off by {error:+.2f} %, expected {limit} %"
                )
    return found


def mean_error_percent(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean size of the errors of allocated; None where nothing was measured."""
    errors = [row["allocated_error_percent"] for row in rows]
    sizes = [abs(error) for error in errors if error is not None]
    return sum(sizes) / len(sizes) if sizes else None


def _row(
    case: MemoryCase, result: Mapping[str, Any], predicted: Mapping[str, float]
) -> dict[str, Any]:
    measured = None
    if "phases" in result:
        after = result["phases"]["train"]
        measured = {
            "allocated_mib": after["max_allocated_mib"],
            "reserved_mib": after["reserved_mib"],
            "device_used_mib": after["device_used_mib"],
            "device_used_before_mib": result["phases"]["initial"]["device_used_mib"],
        }
    return {
        "name": case.name,
        "model_options": dict(case.model_options),
        "step": dict(case.step),
        "measured": measured,
        "predicted": dict(predicted),
        **_errors(measured, predicted),
        "error": result.get("error"),
    }


def _errors(
    measured: Mapping[str, Any] | None, predicted: Mapping[str, float]
) -> dict[str, float | None]:
    errors = {}
    for what in ("allocated", "reserved"):
        truth = None if measured is None else measured[f"{what}_mib"]
        got = predicted[f"{what}_mib"]
        errors[f"{what}_error_percent"] = 100 * (got / truth - 1) if truth else None
    return errors
