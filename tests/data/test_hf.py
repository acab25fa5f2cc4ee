"""Data sets that `datasets` alone wrote, in each of its forms."""

import io
import multiprocessing
import pickle
import sys
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from tests.hf import as_dataset, opening, private_bytes, save_rows, write_rows
from tresnet.data import loaders
from tresnet.data.decoding import BadImageError
from tresnet.data.hf import read_hf
from tresnet.data.loaders import Loader
from tresnet.data.sources import fetch, open_split
from tresnet.data.transforms import train_sampler
from tresnet.errors import DataError, MissingDependencyError
from tresnet.settings import Augment, DataOptions

datasets = pytest.importorskip("datasets")
RANDOM = train_sampler(Augment(), 8)
NAMES = datasets.ClassLabel(names=["a", "b", "c"])


@pytest.fixture
def images(make_images, tmp_path):
    make_images(tmp_path / "images/train", {"a": 5, "b": 4, "c": 3})
    return open_split(tmp_path / "images", "train", RANDOM)


def tar(images, out):
    """Write images in WebDataset's form: KEY.png beside the label in KEY.cls."""
    out.mkdir()
    with tarfile.open(out / "train-0000.tar", "w") as archive:
        for path, label in zip(images.paths, images.targets.tolist(), strict=True):
            key = path.rpartition("/")[2].removesuffix(".png")
            contents = {f"{key}.png": Path(path).read_bytes(), f"{key}.cls": b"%d" % label}
            for name, content in contents.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def saved(images, out):
    as_dataset(images).save_to_disk(out)
    return out


def saved_splits(images, out):
    datasets.DatasetDict(train=as_dataset(images)).save_to_disk(out)


def saved_below(images, out):
    as_dataset(images).save_to_disk(out / "train")


def parquet(images, out):
    (out / "data").mkdir(parents=True)
    rows = as_dataset(images)
    for number in range(2):
        part = rows.shard(2, number, contiguous=True)
        part.to_parquet(out / f"data/train-{number:05}-of-00002.parquet")
    return out


def bucket(images, out):
    parquet(images, out)
    fsspec.filesystem("memory").put(f"{out}/", f"/{out.name}/", recursive=True)
    return f"memory://{out.name}"


def same_batch(one, other):
    (crops, labels), (others, same) = one, other
    images, expected = (each.render(torch.device("cpu")) for each in (crops, others))
    return torch.equal(images, expected) and torch.equal(labels, same)


@pytest.mark.parametrize(
    "write", [saved, saved_splits, saved_below, parquet, tar, bucket], ids=lambda f: f.__name__
)
def test_every_form_gives_the_batches_of_the_folder(images, tmp_path, own_cache, write):
    source = fetch(str(write(images, tmp_path / "set") or tmp_path / "set"))
    dataset = open_split(source, "train", RANDOM)
    assert torch.equal(dataset.targets, images.targets)
    assert dataset.classes == (["0", "1", "2"] if write is tar else images.classes)
    batches = []
    for each, workers in ((images, 0), (dataset, 0), (dataset, 2)):
        loader = Loader(each, 4, training=True, workers=workers, seed=3)
        loader.set_epoch(1, 1)
        batches.append(list(loader))
        loader.close()
    for found in batches[1:]:
        for pair, expected in zip(found, batches[0], strict=True):
            assert same_batch(pair, expected)


def test_a_missing_library_is_named(monkeypatch):
    """tests/cli/test_bad_data.py has a hub that refuses."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"hf-hub:a/b needs datasets.*tresnet\[hf\]"):
        open_split("hf-hub:a/b", "train")


def test_labels_may_be_several_and_columns_may_be_named(images, tmp_path):
    binary, tags = datasets.Value("binary"), datasets.List(NAMES)
    data = [Path(path).read_bytes() for path in [*images.paths][:3]]
    masks = [{"bytes": b"no image", "path": None}] * 3
    save_rows(
        tmp_path / "set",
        {"jpg": binary, "image": datasets.Image(), "tags": tags, "label": NAMES},
        jpg=data,
        image=masks,
        tags=[[2, 0], [], [1]],
        label=[0, 1, 2],
    )

    def opened(label, **settings):
        columns = DataOptions(image_column="jpg", label_column=label)
        return open_split(str(tmp_path / "set"), "train", options=columns, **settings)

    several = opened("tags", multi=True)
    assert several.multi
    assert several.targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert np.array_equal(several[1][0], images.encoded_image(1).rgb())
    assert torch.equal(several[0][1], torch.tensor([1.0, 0.0, 1.0]))
    assert opened("label", multi=None).targets.tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"with any number of labels, but .* has one label"):
        opened("label", multi=True)
    with pytest.raises(DataError, match=r"of class labels in .*, got tags, label .*--label-column"):
        opened(None)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("label", "expected images in column 'label' of .*, got Value"),
        ("text", "expected images in column 'text'"),
        ("images", "one in each row, got List"),
        ("nowhere", "one column of images in .*, got none"),
    ],
)
def test_columns_without_images_are_refused(tmp_path, column, message):
    kinds = map(datasets.Value, ("int64", "string"))
    features = dict(zip(("label", "text"), kinds, strict=True))
    features["images"] = datasets.List(datasets.Image())
    save_rows(tmp_path / "set", features, label=[0, 1], text=["a.png"] * 2, images=[[], []])
    with pytest.raises(DataError, match=message):
        open_split(tmp_path / "set", "train", options=DataOptions(image_column=column))


def test_an_image_that_is_missing_or_damaged_is_named(images, tmp_path, own_cache):
    pictures = [None, {"bytes": b"no image", "path": "2.png"}]
    save_rows(tmp_path / "set", {"label": NAMES}, image=pictures, label=[0, 1])
    dataset = open_split(tmp_path / "set", "train")
    where = rf"column image of the split train of {tmp_path}/set\) cannot be read \("
    missing = rf"but an image \(row 0, {where}the row has no image\): replace or delete it"
    for row, message in enumerate([missing, rf"but 2.png \(row 1, {where}UnidentifiedImageError"]):
        with pytest.raises(BadImageError, match=message):
            dataset[row]
    dataset.skip_bad_images = True
    assert len(dataset.digest) == 64


def test_rows_without_bytes_name_images_in_the_datas_directory(images, tmp_path, own_cache):
    files, _ = read_hf(str(tmp_path / "images"), "train", DataOptions())
    assert np.array_equal(files.open(5).rgb(), images.encoded_image(5).rgb())
    Path(images.paths[5]).unlink()
    with pytest.raises(BadImageError, match=r"005\.png \(row 5, .*FileNotFoundError"):
        files.open(5)
    secret = Path(images.paths[0]).rename(tmp_path / "secret.png")
    save_rows(tmp_path / "set", {"label": NAMES}, label=[0, 1])
    (file,) = (tmp_path / "set").glob("*.arrow")
    (batch,) = pa.ipc.open_stream(file.read_bytes())
    paths = [str(secret), f"{tmp_path}/set/../secret.png"]
    rows = [{"bytes": None, "path": path} for path in paths]
    pictures = pa.array(rows, batch.schema.field("image").type)
    with pa.ipc.new_stream(file, batch.schema) as target:
        target.write_batch(batch.set_column(0, "image", pictures))
    for row in range(2):
        with pytest.raises(
            BadImageError, match=r"secret\.png .*leaves the data's dir.*--outside-pa"
        ):
            open_split(tmp_path / "set", "train")[row]
        options = DataOptions(outside_paths=True)
        assert open_split(tmp_path / "set", "train", options=options)[row][0].size == (8, 8)


def test_the_digest_is_that_of_the_images_wherever_they_are(images, tmp_path, own_cache):
    digests = [
        open_split(source, "train").digest
        for source in (saved(images, tmp_path / "a"), parquet(images, tmp_path / "b"))
    ]
    assert digests[0] == digests[1]
    Image.new("RGB", (8, 8), (0, 1, 0)).save(images.paths[3])
    assert open_split(saved(images, tmp_path / "c"), "train").digest != digests[0]


@pytest.mark.slow  # spawned processes import torch
@pytest.mark.parametrize(("start", "workers"), [("fork", 8), ("forkserver", 8), ("spawn", 3)])
def test_workers_give_the_batches_of_none(images, tmp_path, monkeypatch, start, workers):
    dataset = open_split(saved(images, tmp_path / "set"), "train", RANDOM)
    expected = list(Loader(dataset, 1, training=True))  # the memory map is open
    assert len(pickle.dumps(dataset)) < 5000  # so a spawned worker must open it again
    monkeypatch.setattr(loaders, "usable_cores", lambda: 8)
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(start, force=True)
    try:
        loader = Loader(dataset, 1, training=True, workers=workers)
        found = list(loader)
        assert len(multiprocessing.active_children()) >= workers
        loader.close()
    finally:
        multiprocessing.set_start_method(before, force=True)
    for pair, same in zip(found, expected, strict=True):
        assert same_batch(pair, same)


class Leaking:
    """A transform that holds 1 KB for each image."""

    def __init__(self):
        self.held = []

    def __call__(self, picture):
        self.held.append(bytes(1000))
        return RANDOM(picture)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("leaks", [False, True])
def test_a_workers_memory_does_not_grow_with_the_images_it_read(tmp_path, make_images, leaks):
    """A leak of 1 KB an image, here in the transform, is noticed; half of it is the bound."""
    make_images(tmp_path / "train", {"a": 100, "b": 50, "c": 50})
    folder, transform = open_split(tmp_path, "train"), Leaking() if leaks else RANDOM
    dataset = open_split(saved(folder, tmp_path / "set"), "train", transform)
    loader = Loader(dataset, 8, training=True, workers=1)
    private = []
    for epoch in range(20):
        loader.set_epoch(epoch)
        assert len(list(loader)) == 25
        (worker,) = multiprocessing.active_children()
        private.append(private_bytes(worker.pid))
    loader.close()
    assert (private[-1] - private[3] > 16 * 200 * 500) == leaks


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_cost_little_time_and_memory(tmp_path):
    """14 million open within 5 s and 200 MB; a tenth does within a tenth (and a start of 1 s)."""
    write_rows(tmp_path / "rows", 1_400_000)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rows, opened_s, private = pool.apply(opening, (tmp_path / "rows",))
    assert rows == 1_400_000
    assert opened_s < 1.5
    assert private < 20e6


def test_a_bucket_is_copied_once_and_again_after_a_change(images, tmp_path, own_cache, monkeypatch):
    source = f"file://{saved(images, tmp_path / 'set')}"
    copy = fetch(source)
    assert copy.startswith(str(own_cache / "tresnet"))
    assert fetch(source) == copy
    assert fetch("some/directory") == "some/directory"
    (tmp_path / "set/added").write_text("changed")
    system = type(fsspec.filesystem("file"))
    with monkeypatch.context() as patch:
        get_file = system.get_file
        stopped = [None, None, OSError("connection lost")]

        def fail(self, *arguments, **settings):
            if error := stopped.pop(0):
                raise error
            return get_file(self, *arguments, **settings)

        patch.setattr(system, "get_file", fail)
        with pytest.raises(DataError, match=r"cannot copy file://.* \(OSError: connection lost\)"):
            fetch(source)
    assert {path.name for path in own_cache.glob("tresnet/*/*")} == {".lock", "set"}
    assert fetch(source) != copy
    for missing in (f"file://{tmp_path}/nothing", "nonsense://bucket"):
        with pytest.raises(DataError, match=f"cannot copy {missing} .*: check the address"):
            fetch(missing)


def test_class_folders_come_before_archives_and_a_path_is_no_name_of_a_format(
    images, tmp_path, own_cache, monkeypatch
):
    (tmp_path / "images/train.tar").touch()
    assert [*open_split(str(tmp_path / "images"), "train").paths] == [*images.paths]
    parquet(images, tmp_path / "csv")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(open_split("csv", "train").targets, images.targets)
