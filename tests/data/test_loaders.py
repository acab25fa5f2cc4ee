import math
import multiprocessing
import random
import re
import time
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from tresnet.data import crops as arenas
from tresnet.data import loaders
from tresnet.data.loaders import EpochBatches, Loader
from tresnet.data.sources import open_split
from tresnet.data.transforms import eval_sampler, train_sampler
from tresnet.errors import ConfigError, DataError
from tresnet.settings import Augment, Compute, EvalTransform
from tresnet.steps.feed import Feed

EVAL = eval_sampler(EvalTransform(input_size=8, crop_mode="squash"))
RANDOM = train_sampler(Augment(auto_augment="original"), 16)


CPU = torch.device("cpu")


def rendered(loader):
    """Yield images and labels, as a step's device gets them."""
    for crops, labels in loader:
        yield crops.render(CPU), labels


def ids(images: torch.Tensor) -> list[int]:
    return images[:, 0, 0, 0].tolist()


def epoch_ids(loader) -> list[list[int]]:
    return [ids(images) for images, _ in rendered(loader)]


def damage(folder, index: int, content: bytes = b"not an image") -> str:
    path = next((folder / "train").rglob(f"{index:03d}.png"))
    path.write_bytes(content)
    return path.name


def names(*loaders) -> list[str]:
    return sorted(re.search(r"\d+\.png", path)[0] for each in loaders for path in each.skipped)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_has_each_image_once_with_its_label(folder, workers):
    loader = Loader(open_split(folder, "train", EVAL), 4, training=True, workers=workers)
    assert len(loader) == 6
    orders = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = [list(zip(ids(x), y.tolist(), strict=True)) for x, y in rendered(loader)]
        assert [len(batch) for batch in batches] == [4] * 6  # the rest is dropped
        seen = [pair for batch in batches for pair in batch]
        assert len({image for image, _ in seen}) == 24
        assert all(label == (image >= 11) + (image >= 19) for image, label in seen)
        orders.append(seen)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_repeats_augment_an_image_each_time(folder, ranks):
    """Repeats are those of timm's RepeatAugSampler: copies in a row over all ranks, same length."""
    plain, varied = (open_split(folder, "train", transform) for transform in (EVAL, RANDOM))
    found = []
    for dataset in (plain, varied):
        per_rank = [
            Loader(dataset, 8 // ranks, training=True, distributed=(rank, ranks), repeats=3)
            for rank in range(ranks)
        ]
        assert [len(own) for own in per_rank] == [3] * ranks
        batches = [torch.cat([images for images, _ in rendered(own)]) for own in per_rank]
        found.append(torch.stack(batches, 1).flatten(0, 1))
    images = ids(found[0])
    assert images == [image for image in images[::3] for _ in range(3)]
    assert len(set(images)) == 8
    differing = [len(copies.unique(dim=0)) for copies in found[1].split(3)]
    assert sum(differing) > 12  # of 24; what is left of a plain image may look the same


def test_batches_are_the_same_with_any_number_of_workers_and_any_past(folder):
    dataset = open_split(folder, "train", RANDOM)

    def epoch(workers: int, number: int, seed: int = 0) -> torch.Tensor:
        loader = Loader(dataset, 4, training=True, workers=workers, seed=seed)
        loader.set_epoch(number)
        return torch.cat([images for images, _ in rendered(loader)])

    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    expected, drawn = epoch(0, 3), []
    for loads in (True, False):  # loading leaves the global generators alone
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(123)
        if loads:
            assert torch.equal(epoch(0, 3), expected)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert torch.equal(epoch(2, 3), expected)
    assert not torch.equal(epoch(0, 4), expected)
    assert not torch.equal(epoch(0, 3, seed=1), expected)
    (keys,) = EpochBatches(dataset, 26, True, 0, (0, 1))
    assert len(dict(keys)) == len({seed for _, seed in keys}) == 26  # a seed for each image


UNEQUAL = np.repeat(np.arange(3), [20, 8, 2])  # the class of each of 30 images
WEIGHTS = 1 / np.bincount(UNEQUAL)[UNEQUAL]


def drawn(epochs, batch_size=5, distributed=(0, 1), first=0, **options):
    """Return the keys of the images that are drawn in some epochs, batch by batch."""
    batches = EpochBatches(UNEQUAL, batch_size, True, 3, distributed, weights=WEIGHTS, **options)
    assert len(batches) == 30 // (batch_size * distributed[1])  # the epoch keeps its length
    keys = []
    for epoch in range(epochs):
        batches.set_epoch(epoch, first)
        keys += batches
    return keys


def test_images_are_drawn_as_often_as_by_torchs_weighted_sampler():
    stats = pytest.importorskip("scipy.stats")
    found = np.array([index for batch in drawn(200) for index, _ in batch])
    assert len(found) == 200 * 30
    classes = np.bincount(UNEQUAL[found])
    assert stats.chisquare(classes).pvalue > 0.01  # each class as often as the others
    images = np.bincount(found, minlength=30)
    probabilities = WEIGHTS / WEIGHTS.sum()
    assert stats.chisquare(images, probabilities * len(found)).pvalue > 0.01
    assert stats.chisquare(images).pvalue < 1e-9  # not as often as in a shuffled epoch
    generator = torch.Generator().manual_seed(0)
    sampler = torch.utils.data.WeightedRandomSampler(WEIGHTS, len(found), generator=generator)
    of_torch = np.bincount([*sampler], minlength=30)
    assert stats.chi2_contingency([images, of_torch]).pvalue > 0.01
    # draws of an epoch are independent, so that they differ as much as torch's
    of_epochs = UNEQUAL[found].reshape(200, 30)
    variance = (of_epochs == 2).sum(1).var()
    assert variance == pytest.approx(30 * (1 / 3) * (2 / 3), rel=0.3)


@pytest.mark.parametrize("repeats", [1, 3])
def test_ranks_share_one_draw_and_an_image_drawn_again_is_another_copy(repeats):
    alone = drawn(4, 6, repeats=repeats)
    for ranks in (2, 3):
        each = [drawn(4, 6 // ranks, (rank, ranks), repeats=repeats) for rank in range(ranks)]
        together = [[*zip(*parts, strict=True)] for parts in zip(*each, strict=True)]
        assert [[key for keys in batch for key in keys] for batch in together] == alone
    keys = [key for batch in alone for key in batch]
    assert len({index for index, _ in keys}) < len(keys) == len(set(keys))
    rest = drawn(4, 6, first=2, repeats=repeats)
    assert rest == [batch for epoch in range(4) for batch in alone[5 * epoch + 2 : 5 * epoch + 5]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_goes_on_from_any_batch(folder, workers):
    dataset = open_split(folder, "train", RANDOM)
    loader = Loader(dataset, 4, training=True, workers=workers, seed=5)
    loader.set_epoch(2)
    every = [images for images, _ in rendered(loader)]
    loader.set_epoch(2, start_batch=4)
    assert len(loader) == 6  # of the epoch
    rest = [images for images, _ in rendered(loader)]
    assert len(rest) == 2
    assert all(torch.equal(a, b) for a, b in zip(every[4:], rest, strict=True))
    loader.set_epoch(2, start_batch=6)
    assert list(loader) == []
    loader.set_epoch(3)
    assert len(list(loader)) == 6


def test_memory_is_used_again_but_for_batches_that_somebody_looks_at(folder, tmp_path, monkeypatch):
    """Use a temporary directory whose path is too long for a socket, too."""
    (tmp_path / ("x" * 100)).mkdir()
    configuration = multiprocessing.process.current_process()._config
    monkeypatch.setitem(configuration, "tempdir", str(tmp_path / ("x" * 100)))
    whole = Augment(random_crop=False, auto_augment="original")  # crops of one size
    dataset = open_split(folder, "train", train_sampler(whole, 16))
    expected = [images for images, _ in rendered(Loader(dataset, 1, training=True))]
    loader = Loader(dataset, 1, training=True, workers=1)
    loader.set_epoch(3)
    next(iter(loader))  # an epoch left early does not spill into the next
    loader.set_epoch(0)
    places, kept = set(), None
    for (crops, _), same in zip(loader, expected, strict=True):
        assert torch.equal(crops.render(CPU), same)
        places.add(crops.pixels.data_ptr())
        kept = crops if kept is None else kept
    assert torch.equal(kept.render(CPU), expected[0])
    assert len(places) <= 6 < len(expected)
    every = list(loader)  # copies, of more batches than the workers share
    assert all(torch.equal(a.render(CPU), b) for (a, _), b in zip(every, expected, strict=True))


class Numbers:
    """Images that are filled with their number; some take longer than the others."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.004 * (index % 7 == 0))
        return EVAL(Image.new("RGB", (8, 8), (index,) * 3)), index


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_wait_with_memory_that_the_main_process_copies_slowly(workers, monkeypatch):
    tensors = loaders._LoadedBatch.tensors

    def slowly(*arguments):
        time.sleep(0.02)  # longer than workers take to fill the rest of their memory
        return tensors(*arguments)

    monkeypatch.setattr(loaders._LoadedBatch, "tensors", slowly)
    monkeypatch.setattr(loaders, "usable_cores", lambda: 2)
    loader = Loader(Numbers(), 4, training=True, workers=workers)
    for images, labels in rendered(list(loader)):
        assert (images == labels[:, None, None, None]).all()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("room", [1, 2, 4])
def test_crops_too_large_for_the_arena_are_resized_by_the_worker(
    tmp_path, workers, room, monkeypatch
):
    """Images of many shapes; the batch's images are the same however many bytes an arena has."""
    shapes = [(1, 1), (90, 7), (64, 48), (300, 200), (3, 150), (16, 16), (40, 33), (2, 500)]
    (tmp_path / "train/a").mkdir(parents=True)
    draw = np.random.default_rng(0)
    for index, shape in enumerate(shapes):
        picture = Image.fromarray(draw.integers(0, 256, (*shape, 3), np.uint8))
        picture.save(tmp_path / f"train/a/{index}.png")
    for sampler in (RANDOM, train_sampler(Augment(crop_scale=(1, 1)), 16), EVAL):
        dataset = open_split(tmp_path, "train", sampler)
        found = []
        for room_now, longest, processes in ((1000, 1000, 0), (room, 8, workers)):
            monkeypatch.setattr(arenas, "_ARENA", room_now)
            monkeypatch.setattr(arenas, "_LONGEST", longest)
            loader = Loader(dataset, 8, training=True, workers=processes)
            found += [crops for crops, _ in loader]
            loader.close()
        every, crops = found
        image_bytes = crops.spec.image_bytes
        assert len(crops.pixels) <= crops.capacity == room * 8 * image_bytes < len(every.pixels)
        assert torch.equal(crops.render(CPU), every.render(CPU))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_pins_blocks_of_one_size_and_three_at_once(folder, workers, monkeypatch):
    """Plain memory stands for pinned memory; as in `Feed`, a batch is held while the next comes."""
    blocks, most, sizes = [], 0, set()

    def pinned(size):
        nonlocal most
        block = np.empty(size, np.uint8)
        blocks.append(weakref.ref(block))
        most = max(most, sum(each() is not None for each in blocks))
        sizes.add(size)
        return torch.from_numpy(block)  # holds the array

    monkeypatch.setattr(loaders, "_pinned", pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    dataset = open_split(folder, "train", RANDOM)
    expected = list(Loader(dataset, 2, training=True))
    loader, held = Loader(dataset, 2, training=True, workers=workers, pin_memory=True), None
    for (crops, labels), (plain, same) in zip(loader, expected, strict=True):
        assert torch.equal(crops.render(CPU), plain.render(CPU))
        assert torch.equal(labels, same)
        held = crops
    assert held is not None
    loader.close()
    assert sizes == {held.capacity}
    assert most <= 3 < len(expected)


@pytest.mark.gpu
def test_pinned_memory_is_three_blocks_of_a_loader(folder):
    """Crops have blocks of 2 MiB, and rows and labels small ones."""
    dataset = open_split(folder, "train", train_sampler(Augment(), 256))
    expected = Loader(dataset, 2, training=True)
    loader = Loader(dataset, 2, training=True, workers=2, pin_memory=True)
    feed = Feed(Compute(), torch.device("cuda"), keep_bytes=True)
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    for epoch in range(3):
        loader.set_epoch(epoch)
        expected.set_epoch(epoch)
        for (images, labels), (plain, same) in zip(feed.ahead(loader), expected, strict=True):
            assert torch.equal(images.cpu(), plain.render(CPU))
            assert torch.equal(labels.cpu(), same)
    block = 2 ** math.ceil(math.log2(4 * 2 * 3 * 256 * 256))
    used = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert block <= used < 3.5 * block
    crops, _ = next(iter(loader))
    assert crops.pixels.is_pinned()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("training", [False, True])
def test_a_bad_image_stops_the_epoch_and_is_named(folder, workers, training):
    damage(folder, 7)
    loader = Loader(open_split(folder, "train", EVAL), 4, training=training, workers=workers)
    with pytest.raises(DataError, match=r"007\.png.* cannot be .*--skip-bad-images$") as caught:
        list(loader)
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), (2, 1), (0, 3), (0, 30)])
def test_evaluation_gives_readable_images_to_one_rank_and_counts_the_others_once(
    folder, workers, ranks, caplog
):
    intact = (folder / "train" / "a" / "009.png").read_bytes()
    bad = [damage(folder, i) for i in (1, 4, 5, 6, 7)] + [damage(folder, 9, intact[:50])]
    dataset = open_split(folder, "train", EVAL, skip_bad_images=True)
    options = {"training": False, "workers": workers}
    loaders = [Loader(dataset, 4, distributed=(rank, ranks), **options) for rank in range(ranks)]
    for _ in range(2):
        per_rank = [epoch_ids(loader) for loader in loaders]
        if ranks == 1:  # the second batch, 4 to 7, is bad throughout and does not appear
            assert per_rank == [[
                [0, 2, 3], [8, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23],
                [24, 25],
            ]]  # fmt: skip
        own = [[i for batch in batches for i in batch] for batches in per_rank]
        seen = sorted(i for images in own for i in images)
        assert seen == sorted({*range(26)} - {1, 4, 5, 6, 7, 9})
    assert names(*loaders) == sorted(bad)
    read = [len(images) + len(loader.skipped) for images, loader in zip(own, loaders, strict=True)]
    assert max(read) - min(read) <= 1
    assert all("Error" in reason for loader in loaders for reason in loader.skipped.values())
    assert len(caplog.messages) == len(bad)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("readable", [{*range(26)} - {3, 12, 20, 21}, {0, 8, 16, 24}])
def test_training_puts_another_image_in_place_of_a_bad_one(folder, workers, readable):
    """With 22 of 26 unreadable, 16 replacements of an image fail with a probability of 7 %."""
    bad = [damage(folder, i) for i in {*range(26)} - readable]
    dataset = open_split(folder, "train", EVAL, skip_bad_images=True)
    loader = Loader(dataset, 4, training=True, workers=workers)
    seen = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        seen.append(epoch_ids(loader))
        assert [len(batch) for batch in seen[-1]] == [4] * 6
        assert {i for batch in seen[-1] for i in batch} <= readable
    assert names(loader) == sorted(bad)
    fresh = Loader(dataset, 4, training=True, workers=0)
    fresh.set_epoch(2)
    assert epoch_ids(fresh) == seen[2]


def test_a_folder_of_bad_images_stops_training_and_evaluates_none(folder):
    for index in range(26):
        damage(folder, index)
    dataset = open_split(folder, "train", EVAL, skip_bad_images=True)
    with pytest.raises(DataError, match="more than nine in ten images cannot be read, such as "):
        list(Loader(dataset, 4, training=True))
    loader = Loader(dataset, 4, training=False)
    assert list(loader) == []
    assert len(loader.skipped) == 26


def test_other_errors_of_a_transform_are_not_taken_for_bad_images(folder):
    def broken(image):
        raise RuntimeError("a fault of the transform")

    dataset = open_split(folder, "train", broken, skip_bad_images=True)
    with pytest.raises(RuntimeError, match="a fault of the transform"):
        list(Loader(dataset, 4, training=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"batch_size": 14, "distributed": (0, 2)},
            DataError,
            "full batch of 14 images on each of 2 ranks.* 26 images",
        ),
        ({"batch_size": 0}, ConfigError, "expected batch_size >= 1, workers >= 0"),
        ({"workers": -1}, ConfigError, "expected batch_size >= 1, workers >= 0"),
        ({"distributed": (2, 2)}, ConfigError, "expected batch_size >= 1, workers >= 0"),
        ({"start": -1}, ConfigError, "from 0 to 6, .* got -1: were the data"),
        ({"start": 7}, ConfigError, "from 0 to 6, .* got 7: were the data"),
    ],
)
def test_wrong_numbers_are_refused(folder, options, error, message):
    options = {"batch_size": 4, "training": True, "start": 0, **options}
    start = options.pop("start")
    with pytest.raises(error, match=message):
        Loader(open_split(folder, "train", EVAL), **options).set_epoch(0, start)


def test_workers_end_at_an_error_and_at_close_and_start_anew(folder, workers_now, monkeypatch):
    monkeypatch.setattr(loaders, "usable_cores", lambda: 2)
    loader = Loader(open_split(folder, "train", EVAL), 4, training=False, workers=2)
    first = epoch_ids(loader)
    assert len(workers_now()) == 2
    loader.close()
    assert not workers_now()
    assert epoch_ids(loader) == first
    damage(folder, 7)
    with pytest.raises(DataError) as held:
        list(loader)
    assert not workers_now()
    assert held.traceback  # which keeps the loader alive


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_may_make_complete_images(folder, workers):
    """As for a GPU without kernels; nothing but copies remains for the step's device."""
    dataset, batches = open_split(folder, "train", RANDOM), []
    for render in (False, True):
        loader = Loader(dataset, 8, training=True, workers=workers, render=render)
        batches.append(list(loader))
        loader.close()
    for (crops, _), (images, _) in zip(*batches, strict=True):
        assert torch.equal(images.pixels.view(8, 16, 16, 3), crops.render(CPU).permute(0, 2, 3, 1))
        assert torch.equal(images.render(CPU), crops.render(CPU))


def test_ranks_together_have_the_batch_of_one_process_to_the_bit(folder):
    dataset, batches = open_split(folder, "train", RANDOM), []
    for ranks in (1, 2, 4):
        loaders = [
            Loader(dataset, 8 // ranks, training=True, distributed=(rank, ranks), seed=1)
            for rank in range(ranks)
        ]
        per_rank = [torch.stack([images for images, _ in rendered(own)]) for own in loaders]
        batches.append(torch.stack(per_rank, 2).flatten(1, 2))  # image i is on rank i % ranks
    assert torch.equal(batches[1], batches[0])
    assert torch.equal(batches[2], batches[0])
