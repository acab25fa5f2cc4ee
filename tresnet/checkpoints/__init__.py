"""Files of weights: finding them, reading them safely, renaming their keys, writing them whole."""

from tresnet.checkpoints.load import load_checkpoint
from tresnet.checkpoints.save import atomic_write, checkpoint_metadata, save_checkpoint

__all__ = ["atomic_write", "checkpoint_metadata", "load_checkpoint", "save_checkpoint"]
