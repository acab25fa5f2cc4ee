"""Trains a model: picks a recipe, applies the options, calls the engine."""

import signal

if __name__ == "__main__":
    # Importing torch takes seconds, in which Ctrl-C is to end this without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from tresnet.engine.command import train_main
    from tresnet.engine.distributed import leave

    leave(train_main())
