import io
import logging
import sys

import pytest

from tests.engine.runs import closed_pipe, full_device
from tresnet.engine.console import Bar, Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Replace stderr. Call this within the test, because pytest sets stderr as the test begins."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def use(console):
    with Bar(console, "epoch 1/2", 10, 4) as bar:
        bar.advance()
        bar.show("loss 0.5", line=False)
        bar.show("loss 0.4", line=True)
    console.say("done")
    console.warn("process 1: batches run eagerly")


def test_on_a_terminal_there_is_a_bar_that_knows_what_was_done_before(monkeypatch, capsys):
    screen = terminal(monkeypatch)
    use(Console(is_main=True, progress=True))
    for text in ("epoch 1/2:  50%", "5/10", "loss 0.4"):
        assert text in screen.getvalue()
    assert capsys.readouterr().out == "done\nprocess 1: batches run eagerly\n"


def test_what_is_logged_while_a_bar_is_shown_gets_a_line_of_its_own(monkeypatch):
    screen = terminal(monkeypatch)
    logger, before = logging.getLogger("tresnet.test"), list(logging.getLogger().handlers)
    monkeypatch.setattr(sys, "stdout", screen)
    console = Console(is_main=True, progress=True)
    with Bar(console, "epoch 1/2", 10) as bar:
        bar.advance()
        logger.warning("skipped x.png")
        console.say("compiled in 3 s")
        assert screen.getvalue().count("skipped x.png") == 1
    for line in ("skipped x.png", "compiled in 3 s"):
        assert f"\r{line}\n" in screen.getvalue()
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize(
    ("shown", "is_main", "progress", "lines"),
    [
        (False, True, True, "epoch 1/2  loss 0.4\ndone\n"),  # no terminal
        (True, True, False, "epoch 1/2  loss 0.4\ndone\n"),  # no bar wanted
        (True, False, True, ""),  # another process than the first prints warnings alone
    ],
)
def test_without_a_bar_there_are_lines_of_the_main_process(
    monkeypatch, capsys, shown, is_main, progress, lines
):
    screen = terminal(monkeypatch) if shown else sys.stderr
    use(Console(is_main=is_main, progress=progress))
    assert screen.getvalue() == ""
    assert capsys.readouterr().out == f"{lines}process 1: batches run eagerly\n"


@pytest.mark.parametrize("stream", [closed_pipe, full_device])
@pytest.mark.parametrize("shows_bar", [False, True])
def test_what_cannot_be_shown_is_lost_and_nothing_else(monkeypatch, stream, shows_bar):
    with stream() as screen:
        wrapped = screen
        if shows_bar:
            wrapped = Terminal()
            wrapped.write, wrapped.flush, wrapped.fileno = screen.write, screen.flush, screen.fileno
        monkeypatch.setattr(sys, "stdout", wrapped)
        monkeypatch.setattr(sys, "stderr", wrapped)
        console = Console(is_main=True, progress=True)
        assert console.shows_bars == shows_bar
        for _ in range(2):
            use(console)
        assert isinstance(console.broken, OSError)
        sys.stdout.write("to nowhere")
        sys.stdout.flush()
