"""The training step and the inference step.

`engine` runs them, `measure` times them and `memory` traces them on fake tensors. So the images per
second of a benchmark, those of a run's log and the predicted memory are of the same operations.
"""

from tresnet.steps.hooks import StepHooks
from tresnet.steps.inference import InferenceStep
from tresnet.steps.training import TrainingStep, create_training_step

__all__ = [
    "InferenceStep",
    "StepHooks",
    "TrainingStep",
    "create_training_step",
]
