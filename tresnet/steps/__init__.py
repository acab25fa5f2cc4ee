"""The training step and the inference step, which `engine` runs and `measure` times."""

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
