import errno
import os
import signal
import stat
import time

import pytest
import torch
from safetensors import SafetensorError

from tresnet import writing
from tresnet.errors import BusyError, WriteError
from tresnet.writing import atomic_write


def names(directory):
    return sorted(p.name for p in directory.iterdir())


@pytest.fixture
def old(tmp_path):
    """Yield a file; check at the end that it is unchanged and alone in its directory."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    yield path
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_replaces_the_old_file_and_leaves_no_other(tmp_path):
    """Write through a symbolic link, which stays a link."""
    real, link = tmp_path / "real" / "a.bin", tmp_path / "link.bin"
    real.parent.mkdir()
    real.write_bytes(b"old")
    link.symlink_to(real)
    with atomic_write(link) as temporary:
        assert temporary.parent == real.parent
        temporary.write_bytes(b"new")
        assert real.read_bytes() == b"old"
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert names(real.parent) == ["a.bin"]


# Errors other than those of writing are raised unchanged.
@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, TimeoutError(errno.ETIMEDOUT, "")]
)
def test_failure_keeps_the_old_file(old, error):
    def write_half():
        with atomic_write(old) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(error if isinstance(error, type) else TimeoutError):
        write_half()


def raising(error):
    def write(*_):
        raise error

    return write


def save_to_full_device(path):
    """Let torch.save replace the system's error by "unexpected pos 768 vs 662"."""
    with open("/dev/full", "wb") as stream:
        torch.save({"a": torch.zeros(9999)}, stream)


@pytest.mark.parametrize(
    "write",
    [
        raising(OSError(errno.ENOSPC, "")),
        raising(SafetensorError("Error while serializing: I/O error: text (os error 28)")),
        save_to_full_device,
    ],
)
def test_a_full_disk_is_said_to_be_full_whoever_writes(old, write):
    message = r"cannot write .*a\.bin: No space left on device"
    with pytest.raises(WriteError, match=message), atomic_write(old) as temporary:
        write(temporary)


def test_failing_fsync_keeps_the_old_file(old, monkeypatch):
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.EROFS, "")))
    with pytest.raises(WriteError, match="Read-only file system: choose"):
        writing.write_text(old, "new")


@pytest.fixture
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o077], indirect=True)
def test_permissions_follow_the_umask(tmp_path, umask):
    """Replace the permissions that a library sets, such as 0o600 by safetensors."""
    with atomic_write(tmp_path / "a.bin") as temporary:
        temporary.write_bytes(b"x")
        temporary.chmod(0o600 if umask == 0o022 else 0o644)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("umask", [0o027], indirect=True)
def test_a_directory_appears_complete_or_not_at_all(tmp_path, umask):
    path = tmp_path / "new" / "folder"
    with pytest.raises(FileNotFoundError), writing.atomic_directory(path) as folder:
        (folder / "no" / "a").touch()
    assert names(path.parent) == []
    with writing.atomic_directory(path) as folder:
        (folder / "a").touch()
        assert not path.exists()
    assert (names(path.parent), names(path)) == (["folder"], ["a"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask
    with pytest.raises(WriteError, match="Directory not empty"), writing.atomic_directory(path):
        pass
    assert names(path) == ["a"]


@pytest.mark.parametrize("letter", ["a", "\udcfc", "ü"])
def test_a_long_name_fits(tmp_path, letter):
    path = tmp_path / (letter * (250 // len(os.fsencode(letter))))
    writing.write_text(path, "x")
    assert path.read_text() == "x"


def test_no_file_to_write(tmp_path):
    with pytest.raises(WriteError, match="got a directory"):
        writing.write_text(tmp_path, "")
    with pytest.raises(WriteError, match=r"the directory .*no does not exist"):
        writing.write_text(tmp_path / "no" / "a", "")
    assert names(tmp_path) == []


def test_what_killed_writes_left_is_removed_and_nothing_else(tmp_path):
    with atomic_write(tmp_path / "last.pt") as temporary:
        temporary.touch()
    other = tmp_path / f"{temporary.name}.copy"
    other.touch()
    temporary.touch()
    assert len(names(tmp_path)) == 3
    writing.remove_leftovers(tmp_path)
    assert names(tmp_path) == [other.name, "last.pt"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_lock_keeps_others_out_and_ends_with_its_process_although_its_children_live(tmp_path):
    outlet, inlet = os.pipe()
    holder = os.fork()
    if not holder:
        os.setsid()
        with writing.lock(tmp_path):
            if os.fork():  # the child stands for a loader's worker, which may outlive its parent
                os.write(inlet, b"locked")
            time.sleep(60)
        os._exit(1)
    assert os.read(outlet, 6) == b"locked"
    message = f"expected .* to be free, but process {holder} is at work in it"
    with pytest.raises(BusyError, match=message), writing.lock(tmp_path):
        pass
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    os.killpg(holder, 0)  # raises an error unless the holder's child still runs
    with writing.lock(tmp_path):
        os.killpg(holder, signal.SIGKILL)


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", raising(OSError(errno.ENOLCK, "No locks available")))
    with writing.lock(tmp_path):
        assert "cannot be locked" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(WriteError, match="Permission denied"), writing.lock(tmp_path):
        pass
    with pytest.raises(WriteError, match="Permission denied"):
        writing.write_text(tmp_path / "a", "")
