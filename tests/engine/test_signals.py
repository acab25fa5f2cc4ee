import os
import signal
import threading

import pytest

from tresnet.engine import signals
from tresnet.engine.signals import StopRequest


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_request(signum):
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert stop.signum == 0
        os.kill(os.getpid(), signum)
        assert stop.signum == signum
    assert signal.getsignal(signum) is before


def test_the_echo_of_a_signal_is_ignored_and_the_first_one_counts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGTERM


def test_a_second_signal_stops_at_once(monkeypatch):
    monkeypatch.setattr(signals, "ECHO_S", -1.0)
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_other_threads_install_nothing():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_hangup_is_outlived_and_under_torchrun_a_request(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signum == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signum == signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
