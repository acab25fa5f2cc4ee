"""Predict the likeliest classes of images in files or in memory, or rank them by similarity."""

from tresnet.predictions.pictures import find_images
from tresnet.predictions.predictor import Prediction, Predictor, predict
from tresnet.predictions.similarity import Similar, similar

__all__ = [
    "Prediction",
    "Predictor",
    "Similar",
    "find_images",
    "predict",
    "similar",
]
