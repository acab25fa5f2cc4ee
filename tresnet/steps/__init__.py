"""Training step and inference step, which runs, benchmarks and memory predictions share."""

from tresnet.steps.inference import InferenceStep
from tresnet.steps.training import StepHost, StepSpec, TrainingStep

__all__ = ["InferenceStep", "StepHost", "StepSpec", "TrainingStep"]
