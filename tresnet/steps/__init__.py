"""The training step and the inference step, which `engine` runs and `measure` times."""

from tresnet.steps.inference import InferenceStep
from tresnet.steps.training import StepHost, StepSpec, TrainingStep

__all__ = ["InferenceStep", "StepHost", "StepSpec", "TrainingStep"]
