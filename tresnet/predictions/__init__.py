"""Predictions: the likeliest classes of files, pictures or bytes."""

from tresnet.predictions.predictor import Prediction, Predictor, predict
from tresnet.predictions.sources import find_images

__all__ = ["Prediction", "Predictor", "find_images", "predict"]
