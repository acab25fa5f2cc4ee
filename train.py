"""Trains a model: picks a recipe, applies the options, calls the engine."""

from tresnet.engine.command import train_main
from tresnet.engine.distributed import leave

if __name__ == "__main__":
    leave(train_main())
