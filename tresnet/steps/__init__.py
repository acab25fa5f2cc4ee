"""Training step and inference step, for training, evaluation, benchmarks and memory predictions."""

from tresnet.steps.inference import InferenceStep
from tresnet.steps.training import StepHost, TrainingStep

__all__ = ["InferenceStep", "StepHost", "TrainingStep"]
