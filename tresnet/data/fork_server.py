"""Imported by Python's fork server alone, last, to outlive signals to the main process's group.

torchrun and terminals signal the whole group. A run that ends in order still needs its workers, and
their DataLoader takes them for dead when the server is.
"""

import signal

from tresnet.data.workers import detach

detach(signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which its processes get
