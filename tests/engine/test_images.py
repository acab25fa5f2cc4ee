"""Images of a run: shards in place of folders, and their fingerprint."""

import shutil

import pytest

from tests.engine.images import write_images
from tests.engine.runs import assert_same_run
from tresnet.cli.main import main
from tresnet.engine import images
from tresnet.engine.train import train
from tresnet.errors import ConfigError, DataError


def test_a_run_on_shards_is_the_run_on_their_folder_and_notices_other_shards(
    data, tiny, finished, tmp_path
):
    pytest.importorskip("array_record")
    shards = str(tmp_path / "shards")
    assert main(["shard", str(data), shards, "--images-per-shard", "7", "--workers", "1"]) == 0
    run_dir = train(tiny(data=shards)).run_dir
    assert_same_run(run_dir, finished)
    smaller = ["shard", str(data), shards, "--max-side", "9", "--workers", "1"]
    assert main(smaller) == 2  # they would replace the others
    shutil.rmtree(shards)
    assert main(smaller) == 0
    with pytest.raises(ConfigError, match="images"):
        train(tiny(data=shards), run_dir)
    with pytest.raises(DataError, match=r"any number of labels.*with --multilabel"):
        train(tiny(data=shards, name="other", loss="asymmetric", mixup=0.0, label_smoothing=0.0))


def test_other_files_sizes_and_labels_have_another_fingerprint(tmp_path):
    def found():
        return images.fingerprint(images.open_split(tmp_path, "train", None, False), tmp_path)

    write_images(tmp_path, "train", 9)
    (path, other, _) = sorted((tmp_path / "train" / "red").iterdir())
    prints = [found()]
    path.write_bytes(path.read_bytes() + b" ")
    prints.append(found())
    path.rename(tmp_path / "train" / "green" / path.name)
    prints.append(found())
    other.unlink()
    assert len({*prints, found()}) == 4
