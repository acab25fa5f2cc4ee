"""Images of a run: shards in place of folders."""

import shutil

import pytest

from tests.engine.runs import assert_same_run
from tresnet.cli.main import main
from tresnet.engine.train import train
from tresnet.errors import ConfigError, DataError

pytest.importorskip("array_record")


def test_a_run_on_shards_is_the_run_on_their_folder_and_notices_other_shards(
    data, tiny, finished, tmp_path
):
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
