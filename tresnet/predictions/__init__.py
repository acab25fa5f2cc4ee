"""Predict the likeliest classes of images in files or in memory."""

from tresnet.predictions.predictor import Prediction, Predictor, predict
from tresnet.predictions.sources import find_images

__all__ = ["Prediction", "Predictor", "find_images", "predict"]
