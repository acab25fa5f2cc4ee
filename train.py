"""Trains a model: picks a recipe, applies the options, calls the engine."""

import sys

from tresnet.engine.command import train_main

if __name__ == "__main__":
    sys.exit(train_main())
