"""Predict the likeliest classes of images in files or in memory."""

from tresnet.predictions.pictures import find_images
from tresnet.predictions.predictor import Prediction, Predictor, predict

__all__ = ["Prediction", "Predictor", "find_images", "predict"]
