"""What images show: from files, pictures or bytes to the likeliest classes."""

from tresnet.predictions.predictor import Prediction, Predictor, predict
from tresnet.predictions.sources import find_images

__all__ = ["Prediction", "Predictor", "find_images", "predict"]
