"""Files of weights: finding them, reading them safely, renaming their keys, writing them whole."""

from tresnet.checkpoints.create import create
from tresnet.checkpoints.load import load_checkpoint
from tresnet.checkpoints.manifest import describe, fetch, find, list_weights
from tresnet.checkpoints.save import checkpoint_metadata, save_checkpoint

__all__ = [
    "checkpoint_metadata",
    "create",
    "describe",
    "fetch",
    "find",
    "list_weights",
    "load_checkpoint",
    "save_checkpoint",
]
