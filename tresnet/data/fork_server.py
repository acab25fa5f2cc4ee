"""Imported by Python's fork server alone, last, to outlive signals to the main process's group.

torchrun and terminals signal the whole group. A run that ends in order still needs its workers, and
their DataLoader takes them for dead when the server is.
"""

import signal

from tresnet.data.workers import detach

detach(signal.default_int_handler)
