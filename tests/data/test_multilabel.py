"""Labels from CSV and COCO-style JSON, and the canvases of several digits."""

import csv
import json
import unicodedata
from pathlib import Path

import pytest
import torch
from PIL import Image

from tresnet.data import digits_multilabel
from tresnet.data.folder import align_classes
from tresnet.data.loaders import create_loader
from tresnet.data.sources import open_split
from tresnet.data.transforms import eval_sampler
from tresnet.errors import DataError
from tresnet.settings import DataOptions, EvalTransform


def write_images(folder: Path, names: list[str]) -> None:
    for shade, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (6, 5), 40 * shade).save(folder / name)


def opened(root: Path, **options):
    return open_split(root, "train", multi=True, options=DataOptions(**options))


NAMES = ["train/a.png", "train/b.png", "train/sub/c.png"]
COLUMNS = "image,cat,dog,red car\ntrain/a.png,1,0,1\ntrain/b.png,0,0,0\ntrain/sub/c.png,0,1,0\n"
NAMED = "image,labels\ntrain/a.png,cat; red car\ntrain/b.png,\ntrain/sub/c.png,dog\n"
COCO = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 3, "file_name": "b.png"}],
    "categories": [{"id": 9, "name": "dog"}, {"id": 2, "name": "cat"}],
    "annotations": [
        {"image_id": 7, "category_id": 9},
        {"image_id": 7, "category_id": 9},
        {"image_id": 7, "category_id": 2},
    ],
}


def coco(**changes):
    return {"train.json": json.dumps(COCO | changes)}


def indexed(text):
    """Return the table as pandas writes it, with an index column that has no name."""
    lines = text.splitlines()
    return "\n".join([f",{lines[0]}", *(f"{i},{line}" for i, line in enumerate(lines[1:]))])


QUOTED = NAMED.replace("cat; red car", '"cat;\nred car"')


@pytest.mark.parametrize(
    "text",
    [
        COLUMNS,
        COLUMNS.replace(",", ", ").replace("\n", "\r\n"),
        COLUMNS.replace("\n", "\n\n"),
        NAMED,
        QUOTED,
        "\ufeff" + NAMED,
        COLUMNS.replace(",1", ",1.0").replace(",0", ",0.0"),
        COLUMNS.replace(",1", ",True").replace(",0", ",False"),
        indexed(COLUMNS),
        indexed(indexed(NAMED)),
        indexed(COLUMNS).replace("image", "Unnamed: 0,image", 1).replace("train/", "7,train/"),
    ],
)
def test_both_tables_say_the_same(tmp_path: Path, text: str):
    write_images(tmp_path, NAMES)
    (tmp_path / "train.csv").write_text(text, encoding="utf-8")
    dataset = opened(tmp_path)
    assert dataset.classes == ["cat", "dog", "red car"]
    assert dataset.targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert [Path(path).name for path in dataset.paths] == ["a.png", "b.png", "c.png"]
    assert dataset[2][0].mode == "RGB"
    dataset.transform = eval_sampler(EvalTransform(input_size=(5, 6)))
    crops, labels = next(iter(create_loader(dataset, 3, training=False)))
    assert crops.render(torch.device("cpu")).shape == (3, 3, 5, 6)
    assert labels.dtype == torch.float32
    assert labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("separator", [" ", ",", "|", "/", "\t", ", ", " | ", "+", "&"])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "labels",
    [
        ["mildew", "complex", "mildew complex"],
        ["clear primary", "haze", "clear primary water haze"],
        ["a", "b", "c", "a b", "b c", "a c", "a b c"],
    ],
)
def test_another_separator_is_named_and_taken(tmp_path: Path, separator, order, labels):
    images = [f"{index}.png" for index in range(len(labels))]
    write_images(tmp_path, images)
    cells = [label.replace(" ", separator) for label in labels][::order]
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "labels"), *zip(images, cells, strict=True)])
    expected = {name for label in labels for name in label.split()}
    if len(expected) < 4:
        text = rf"by --label-separator ';', or {len(expected)} classes \(.*by --label-separator '"
        with pytest.raises(DataError, match=text):
            opened(tmp_path)
    assert set(opened(tmp_path, label_separator=separator).classes) == expected
    assert set(opened(tmp_path, label_separator=";").classes) == set(cells)


@pytest.mark.parametrize(
    "labels",
    [
        ["red car", "dog", "cat"],
        ["hot dog", "dog", "cat"],
        ["red car", "blue car", "red bus"],
        ["apple, green", "apple, red", "apple"],
        ["sea/lake", "sea", "land"],
        ["New York", "York", "York;New York"],
    ],
)
def test_names_may_hold_a_space_or_another_separator(tmp_path: Path, labels):
    write_images(tmp_path, NAMES)
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "labels"), *zip(NAMES, labels, strict=True)])
    expected = sorted({name for label in labels for name in label.split(";")})
    assert opened(tmp_path).classes == expected


def test_a_list_of_classes_decides_about_a_separator(tmp_path: Path):
    write_images(tmp_path, NAMES)
    rows = zip(NAMES, ["hot", "dog", "hot dog"], strict=True)
    lines = ["image,labels", *map(",".join, rows)]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match="by --label-separator ' '; choose one"):
        opened(tmp_path)
    (tmp_path / "names.txt").write_text("dog\nhot dog\nhot\n")
    options = DataOptions(class_map=str(tmp_path / "names.txt"))
    mapped = open_split(str(tmp_path), "train", multi=True, options=options)
    assert mapped.classes == ["dog", "hot dog", "hot"]
    assert mapped.targets.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    (tmp_path / "classes.txt").write_text("\ufeffdog\nbird\nhot dog\nhot\n", encoding="utf-8")
    listed = opened(tmp_path)
    assert listed.classes == ["dog", "bird", "hot dog", "hot"]
    assert listed.targets.tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]]


def test_paths_and_names_are_found_in_both_forms_of_unicode(tmp_path: Path):
    composed, apart = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    write_images(tmp_path, [f"train/{apart}.png", f"val/{composed}.png"])
    for split, name, path in (("train", composed, composed), ("val", apart, apart)):
        (tmp_path / f"{split}.csv").write_text(f"image,labels\n{split}/{path}.png,{name}\n")
    train, val = (open_split(tmp_path, split, multi=True) for split in ("train", "val"))
    align_classes(train, val)
    assert train.classes == [composed]
    assert [split[0][0].size for split in (train, val)] == [(6, 5)] * 2


@pytest.mark.parametrize("place", ["train.json", "annotations/instances_train.json"])
def test_cocos_categories_are_in_the_order_of_their_ids(tmp_path: Path, place: str):
    write_images(tmp_path, ["train/a.png", "train/b.png"])
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("\ufeff" + json.dumps(COCO), encoding="utf-8")
    dataset = opened(tmp_path)
    assert dataset.classes == ["cat", "dog"]
    assert dataset.targets.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"one of train.csv, train.json, annotations/instances_train.json"),
        ({"train.csv": ""}, "expected a header line"),
        ({"train.csv": "image,labels\n"}, "lists none"),
        ({"train.csv": "image,labels\ntrain/a.png,\n"}, "no image has any"),
        ({"train.csv": "image,cat,cat\n"}, "expected every column once, got cat"),
        ({"train.csv": "image,cat\ntrain/a.png,1,1\n"}, r"train.csv:2: expected 2 cells, got 3"),
        ({"train.csv": "image,cat\ntrain/a.png,yes\n"}, "train.csv:2: expected 0 or 1.*'yes'"),
        (
            {"train.csv": "image,cat\ntrain/x.png,1\n"},
            "the image train/x.png below .*, got none",
        ),
        ({"train.csv": "image,cat\n" + "train/a.png,1\n" * 2}, "every image once.*a.png twice"),
        ({"train.csv": "image,labels\ntrain/a.png,['cat']\n"}, r"got the list \['cat'\]: write"),
        ({"train.csv": 'image,labels\n"train/a.png,cat\n'}, "cannot read the labels in.*end of"),
        ({"train.csv": "image,Labels\ntrain/a.png,cat\n"}, "one column, 'labels' in the header"),
        ({"train.csv": 'image,cat\n"train/a\n.png",1\nx,1,1\n'}, r"train.csv:4: expected 2 cells"),
        ({"train.csv": "image,cat\n/images/a.png,1\n"}, "paths below .*, got /images/a.png"),
        ({"train.csv": NAMED, "classes.txt": "cat\ndog\n"}, "not in .*classes.txt: red car"),
        ({"train.csv": NAMED, "classes.txt": "\udce9"}, "cannot read the classes in .*classes.txt"),
        ({"train.csv": NAMED, "classes.txt": "cat\ndog\nred car\ncat"}, "every class once"),
        ({"train.json": "{"}, "train.json: expected lists of images .*, got JSONDecodeError: Ex"),
        ({"train.json": "[1]"}, "expected lists of images .*, got TypeError: list indices"),
        (coco(annotations=[{"image_id": 7}]), "got KeyError: 'category_id'"),
        (coco(annotations=[{"image_id": 7, "category_id": [9]}]), "TypeError: unhashable"),
        (coco(images=COCO["images"] * 2), "every id in images once, got 7, 3 twice"),
        (coco(categories=COCO["categories"][:1] * 2), "every id in categories once, got 9 twice"),
        (
            coco(categories=[{"id": 2, "name": "c"}, {"id": "b", "name": "d"}], annotations=[]),
            "numbers or texts as ids of categories, got both",
        ),
        (
            coco(annotations=[{"image_id": 1, "category_id": 2}]),
            "image 1 and category 2, which are not both listed",
        ),
        (
            coco(categories=[{"id": 2, "name": "x"}, {"id": 9, "name": "x"}]),
            "every category once, got x twice",
        ),
    ],
)
def test_faulty_lists_are_refused(tmp_path: Path, files: dict[str, str], message: str):
    write_images(tmp_path, NAMES)
    for name, text in files.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


def test_splits_must_number_their_labels_alike(tmp_path: Path):
    write_images(tmp_path, ["train/a.png", "val/a.png"])
    (tmp_path / "train.csv").write_text("image,cat,dog\ntrain/a.png,1,0\n")
    (tmp_path / "val.csv").write_text("image,dog,cat\nval/a.png,1,0\n")
    train, val = (open_split(tmp_path, split, multi=True) for split in ("train", "val"))
    with pytest.raises(
        DataError, match="same order of classes in train and val, got cat, dog; dog, cat: list"
    ):
        align_classes(train, val)
    align_classes(train, train)
    (tmp_path / "val.csv").write_text("image,labels\nval/a.png,bird;cat\n")
    with pytest.raises(DataError, match=r"only in train: dog; only in val: bird: list all .*txt"):
        align_classes(train, open_split(tmp_path, "val", multi=True))


@pytest.fixture(scope="module")
def canvases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    return digits_multilabel.write(tmp_path_factory.mktemp("data"))


def test_the_canvases_are_the_same_everywhere_and_written_once(canvases: Path):
    before = (canvases / "train.csv").stat().st_mtime_ns
    assert digits_multilabel.write(canvases.parent) == canvases
    assert (canvases / "train.csv").stat().st_mtime_ns == before
    train, val = (open_split(canvases, split, multi=True) for split in ("train", "val"))
    assert (len(train), len(val)) == (3000, 750)
    assert train.classes == [str(digit) for digit in range(10)]
    each = train.targets.sum(1)
    assert (each.min(), each.max()) == (1, 4)
    assert train[0][0].size == (40, 40)
