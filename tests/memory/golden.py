"""Predictions that must not change unnoticed: `python -m tests.memory.golden` writes them again."""

import json
from pathlib import Path

from tresnet.memory import predict

FILE = Path(__file__).resolve().parents[1] / "golden" / "memory.json"
CASES = [
    ("tresnet_t", {"batch_size": 16}),
    ("tresnet_t", {"batch_size": 16, "amp": "fp16", "ema_decay": 0.99, "clip_grad": 1.0}),
    ("tresnet_m", {"batch_size": 256, "amp": "bf16", "channels_last": True, "input": "uint8"}),
    ("tresnet_m", {"batch_size": 256, "amp": "bf16", "recompute": "outputs", "ddp": True}),
    ("tresnet_m", {"batch_size": 64, "train": False, "dtype": "bf16", "channels_last": True}),
    ("timm:resnet50", {"batch_size": 64, "optimizer": "adamw", "accumulate": 2}),
    ("timm:vit_tiny_patch16_224", {"batch_size": 16, "amp": "bf16", "grad_checkpointing": True}),
]


def predict_all() -> dict[str, list[int]]:
    """Bytes allocated and reserved, at their highest, and allocated at the end."""
    numbers = {}
    for name, settings in CASES:
        p = predict(name, device="a100", **settings)
        numbers[f"{name} {json.dumps(settings)}"] = [
            p.allocated.expected_bytes,
            p.allocated.high_bytes,
            p.reserved.expected_bytes,
            p.end_allocated_bytes,
        ]
    return numbers


def read() -> dict[str, list[int]]:
    """What the file says."""
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    FILE.write_text(json.dumps(predict_all(), indent=1) + "\n")
