"""The training step and the inference step.

`engine` runs these steps, `measure` times them, and `memory` traces them on fake tensors. So
benchmarks, training logs and memory predictions describe the same operations.
"""

from tresnet.steps.hooks import StepHooks
from tresnet.steps.inference import InferenceStep
from tresnet.steps.training import StepHost, StepSpec, TrainingStep, create_training_step

__all__ = [
    "InferenceStep",
    "StepHooks",
    "StepHost",
    "StepSpec",
    "TrainingStep",
    "create_training_step",
]
