"""Files of weights: finding them, reading them safely, renaming their keys, writing them."""

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.download import fetch
from tresnet.checkpoints.load import load_checkpoint
from tresnet.checkpoints.published import find, list_weights
from tresnet.checkpoints.save import checkpoint_metadata, save_checkpoint
from tresnet.checkpoints.weights import WeightsInfo, open_weights

__all__ = [
    "WeightsInfo",
    "checkpoint_metadata",
    "create",
    "fetch",
    "find",
    "list_weights",
    "load_checkpoint",
    "open_weights",
    "save_checkpoint",
]
