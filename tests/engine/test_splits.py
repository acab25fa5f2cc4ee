"""Images of a run: Hugging Face data sets in place of folders, and their fingerprint."""

import contextlib
import dataclasses
import json
import shutil

import pytest
import torch

from tests.engine.runs import ALONE, assert_same_run, eval_main, resolved, write_images
from tests.engine.test_distributed import SCRIPT, forked, saved
from tests.engine.test_losses import MANY, UNEQUAL, dataset
from tests.engine.test_train import steps_in, train_until
from tests.hf import as_dataset
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.cli.main import main
from tresnet.data.sources import open_split
from tresnet.engine import splits, state
from tresnet.engine.train import train
from tresnet.errors import ConfigError, DataError


def test_a_run_on_shards_is_the_run_on_their_folder_and_notices_other_shards(
    data, tiny, finished, tmp_path
):
    pytest.importorskip("datasets")
    shards = str(tmp_path / "shards")
    assert main(["shard", str(data), shards, "--workers", "1"]) == 0
    run_dir = train(tiny(data=shards)).run_dir
    assert_same_run(run_dir, finished)
    smaller = str(tmp_path / "smaller")
    assert main(["shard", str(data), smaller, "--max-side", "9", "--workers", "1"]) == 0
    with pytest.raises(ConfigError, match="images"):
        train(tiny(data=smaller), run_dir)
    with pytest.raises(DataError, match=r"any number of labels, but .* has one label per image"):
        train(tiny(data=shards, name="other", loss="asymmetric", mixup=0.0, label_smoothing=0.0))


def test_images_of_both_splits_are_warned_of(data, tiny, tmp_path, caplog):
    images = shutil.copytree(data, tmp_path / "images")
    splits.open_splits(resolved(tiny(data=str(images))), ALONE)
    assert not caplog.text
    source = next((images / "train" / "red").iterdir())
    copy = shutil.copy(source, images / "val" / "blue" / "again.png")
    splits.open_splits(resolved(tiny(data=str(images))), ALONE)
    assert f"1 images of val or more are in train too, such as {copy} as {source}" in caplog.text


@pytest.mark.parametrize("folder", ["images", "."])
def test_classes_without_images_to_validate_are_warned_of(tiny, tmp_path, caplog, folder):
    write_images(tmp_path / "images", train=6, val=2)
    for split in ("train", "val"):
        names = [path.relative_to(tmp_path) for path in tmp_path.glob(f"images/{split}/*/*")]
        rows = [f"{name},{name.parent.name}" for name in names]
        (tmp_path / f"{split}.csv").write_text("\n".join(["image,label", *rows]))
    opened = splits.open_splits(resolved(tiny(data=str(tmp_path / folder))), ALONE)
    assert opened.val.classes == ["blue", "green", "red"]
    assert "val lacks images of red: its scores leave these out" in caplog.text


def test_parquet_that_others_wrote_is_trained_resumed_and_evaluated(
    data, tiny, tmp_path, own_cache
):
    source, moved = tmp_path / "set", tmp_path / "moved"
    for split, name in {"train": "train", "val": "validation"}.items():
        (source / "data").mkdir(parents=True, exist_ok=True)
        rows = as_dataset(open_split(data, split))
        rows.to_parquet(source / f"data/{name}-00000-of-00001.parquet")
    run_dir = train_until(4, tiny(data=str(source))).run_dir
    source.rename(moved)  # the fingerprint of `datasets` changes, the images do not
    done = forked(SCRIPT, saved(tiny(data=str(moved)), tmp_path), "--resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert steps_in(run_dir) == 12
    weights, found = str(run_dir / "best.safetensors"), tmp_path / "found.json"
    common = ["--weights", weights, "--workers", "0", "--device", "cpu", "--output", str(found)]
    assert eval_main(["--data", str(moved), *common]) == 0
    assert json.loads(found.read_text())["images"] == 11


def test_other_files_sizes_and_labels_have_another_fingerprint(tmp_path):
    def found():
        return splits.fingerprint(open_split(tmp_path, "train"), str(tmp_path))

    write_images(tmp_path, train=9)
    (path, other, _) = sorted((tmp_path / "train" / "red").iterdir())
    prints = [found()]
    path.write_bytes(path.read_bytes() + b" ")
    prints.append(found())
    path.rename(tmp_path / "train" / "green" / path.name)
    prints.append(found())
    other.unlink()
    assert len({*prints, found()}) == 4


def test_a_run_draws_each_class_as_often_as_the_others(tiny, tmp_path):
    write_images(tmp_path / "unequal", ("many", "many", "many", "few"), train=40, val=4)
    fractions = []
    for sampler in ("shuffle", "balanced"):
        config = resolved(tiny(data=str(tmp_path / "unequal"), sampler=sampler))
        opened = splits.open_splits(config, ALONE)
        with contextlib.ExitStack() as stack:
            loader, _ = splits.open_loaders(config, opened, 4, ALONE, stack)
            assert len(loader) == 10
            labels = []
            for epoch in range(20):
                loader.set_epoch(epoch)
                labels += [each for _, each in loader]
        fractions.append(torch.cat(labels).double().mean().item())
    assert opened.classes == ["few", "many"]
    # 800 draws; a fraction of 0.5 has the standard deviation 0.018
    assert fractions == [0.75, pytest.approx(0.5, abs=0.05)]


def test_a_balanced_draw_needs_images_of_each_class():
    assert splits.draw_weights("shuffle", dataset(UNEQUAL)) is None
    weights = splits.draw_weights("balanced", dataset(UNEQUAL))
    assert weights is not None
    assert weights.tolist() == [1 / 4] * 4 + [1 / 2] * 2 + [1]
    expected = r"--sampler balanced: expected images of each class in train, got none for b: add"
    with pytest.raises(ConfigError, match=expected):
        splits.draw_weights("balanced", dataset([0, 0, 2]))
    weights = splits.draw_weights("balanced", dataset([[*row, 0] for row in MANY], "abcd"))
    assert weights is not None  # no image has to show the label d
    assert weights.tolist() == [1 / 3, 1, 1 / 4, 1 / 3, 1 / 3]


def test_a_run_whose_numbers_were_sorted_as_texts_goes_on(tiny, tmp_path):
    """Make the state that a version wrote which put the class 10 in front of the class 2."""
    names = tuple(map(str, range(12)))
    write_images(tmp_path / "images", names, train=24, val=12)
    for split in ("train", "val"):
        paths = (tmp_path / "images" / split).rglob("*.png")
        rows = [f"{path.relative_to(tmp_path)},{path.parent.name}\n" for path in paths]
        (tmp_path / f"{split}.csv").write_text("".join(["image,label\n", *rows]))
    config = tiny(data=str(tmp_path), mixup=0.0)
    run_dir = train_until(3, config).run_dir
    opened = splits.open_splits(resolved(config), ALONE)
    assert tuple(opened.classes) == names
    former = opened.arranged(sorted(names)).hashed(resolved(config), ALONE)
    assert former.fingerprints != opened.fingerprints
    content = torch.load(run_dir / "last.pt", weights_only=True)
    content["identity"] = dataclasses.asdict(former.identity(1))
    torch.save(content, run_dir / "last.pt")
    train(config, run_dir)
    assert open_checkpoint(run_dir / "best.safetensors").classes == tuple(sorted(names))
    assert state.read(run_dir / "last.pt").identity == former.identity(1)
    path = tmp_path / "train.csv"
    path.write_text(path.read_text().replace(",11\n", ",3\n", 1))
    with pytest.raises(ConfigError, match=r"the training images .* changed since the run began"):
        train(config, run_dir)
