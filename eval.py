"""Evaluates weights: reads the options, calls the engine."""

import sys

from tresnet.engine.command import eval_main

if __name__ == "__main__":
    sys.exit(eval_main())
