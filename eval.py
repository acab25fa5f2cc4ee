"""Evaluates weights: reads the options, calls the engine."""

from tresnet.engine.command import eval_main
from tresnet.engine.distributed import leave

if __name__ == "__main__":
    leave(eval_main())
