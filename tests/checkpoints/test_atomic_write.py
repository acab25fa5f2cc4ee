import os
import stat

import pytest

from tresnet.checkpoints.save import atomic_write


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def write_half_then_raise(path, error):
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"half")
        raise error


def test_replaces_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with atomic_write(path) as temporary:
        assert temporary.parent == path.parent
        assert not temporary.exists()
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
def test_failure_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(error):
        write_half_then_raise(path, error)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_failing_fsync_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), atomic_write(path) as temporary:
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "a.bin"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("library_mode", [None, 0o600])
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_follow_the_umask(tmp_path, umask, library_mode):
    """Also where the library that writes keeps its files to their owner, as safetensors does."""
    path = tmp_path / "a.bin"
    before = os.umask(umask)
    try:
        with atomic_write(path) as temporary:
            temporary.write_bytes(b"x")
            if library_mode is not None:
                temporary.chmod(library_mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_writes_through_a_symbolic_link(tmp_path):
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "a.bin"
    real.write_bytes(b"old")
    link = tmp_path / "link.bin"
    link.symlink_to(real)
    with atomic_write(link) as temporary:
        assert temporary.parent == real.parent
        temporary.write_bytes(b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_long_name_fits(tmp_path):
    path = tmp_path / ("a" * 250)
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"x")
    assert path.read_bytes() == b"x"


def test_directories(tmp_path):
    with pytest.raises(IsADirectoryError, match="got a directory"), atomic_write(tmp_path):
        pass
    with pytest.raises(FileNotFoundError, match="does not exist"), atomic_write(tmp_path / "no/a"):
        pass
