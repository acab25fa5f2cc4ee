import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tresnet.engine import distributed
from tresnet.engine.distributed import StopRequest


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_request_and_a_later_one_stops_at_once(monkeypatch, signum):
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert stop.signum == 0
        for sent in (signum, signal.SIGINT, signal.SIGTERM):  # the first one counts
            signal.raise_signal(sent)
            assert stop.signum == signum
    assert signal.getsignal(signum) is before
    monkeypatch.setattr(distributed, "ECHO_S", -1.0)
    with StopRequest():
        signal.raise_signal(signum)
        with pytest.raises(KeyboardInterrupt):  # the second one stops at once
            signal.raise_signal(signum)


def test_other_threads_install_nothing():
    def enter() -> object:
        with StopRequest():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor() as threads:
        assert threads.submit(enter).result() is signal.getsignal(signal.SIGINT)


DEFAULT, UNDER_NOHUP = signal.SIG_DFL, signal.SIG_IGN


@pytest.mark.parametrize(
    ("handler", "run_id", "signum"),
    [(DEFAULT, None, 0), (DEFAULT, "1", signal.SIGHUP), (UNDER_NOHUP, "1", 0)],
)
def test_a_hangup_is_outlived_and_under_torchrun_a_request(monkeypatch, handler, run_id, signum):
    before = signal.signal(signal.SIGHUP, handler)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signum == signum
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)
