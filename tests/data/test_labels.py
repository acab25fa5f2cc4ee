"""Labels of every source, as images have them, and how they meet the outputs of a model."""

import csv
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.data.readers.reader_image_folder import find_images_and_targets

from tests.hf import save_rows
from tresnet.data.dataset import ImageDataset, Paths
from tresnet.data.labels import HOT, Labels, match, read_names
from tresnet.data.sources import open_split
from tresnet.engine.splits import _with_classes_of
from tresnet.errors import ConfigError, DataError
from tresnet.settings import DataOptions

datasets = pytest.importorskip("datasets")
NAMES = datasets.ClassLabel(names=["a", "b", "c"])
INT, FLOAT, BOOL, TEXT = map(datasets.Value, ("int64", "float32", "bool", "string"))
LIST = datasets.List
IMAGES = "train/a.png train/b.png train/sub/c.png"
COLUMNS = "image,cat,dog,red car\ntrain/a.png,1,0,1\ntrain/b.png,0,0,0\ntrain/sub/c.png,0,1,0\n"
NAMED = "image,labels\ntrain/a.png,cat; red car\ntrain/b.png,\ntrain/sub/c.png,dog\n"
COCO = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 3, "file_name": "b.png"}],
    "categories": [{"id": 9, "name": "dog"}, {"id": 2, "name": "cat"}],
    "annotations": [{"image_id": 7, "category_id": category} for category in (9, 9, 2)],
}


def write(root, files, images=""):
    """Write texts by name, and empty files in place of images, which opening does not read."""
    for name, text in {**files, **dict.fromkeys(images.split(), "")}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        content = text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
        (root / name).write_bytes(content)


def write_rows(root, kind, labels):
    save_rows(root, {"label": kind}, label=labels)


def found(root, split="train", multi=None, **options):
    """Return the classes, and the label or the labels of each image."""
    data = open_split(root, split, multi=multi, options=DataOptions(**options))
    labels = [data.labels.of_image(image) for image in range(len(data))]
    return data.classes, labels if data.multi else [label for (label,) in labels]


def one(rows, images="", **files):
    """Return a case of one label for each image: text of train.csv, images, and other files."""
    return {"train.csv": f"image,label\n{rows}", **files}, images, False


def many(text, images=IMAGES, name="train.csv", **files):
    """Return a case of any number of labels."""
    return {name: text, **files}, images, True


def coco(**changes):
    return many(json.dumps(COCO | changes), name="train.json")


def indexed(text):
    """Return the table as pandas writes it, with an index column that has no name."""
    lines = text.splitlines()
    return "\n".join([f",{lines[0]}", *(f"{i},{line}" for i, line in enumerate(lines[1:]))])


SAID = ["cat", "dog", "red car"], [[0, 2], [], [1]]
CAT_DOG = ["cat", "dog"], [[0, 1], []]
HEADER = "expected the header 'image,label', and a path and a label in each line, got"
LISTS = {"classes.txt": "\ufeffdog\nbird\n\nred car\ncat\n"}
# Files of a data set -> classes and labels, or a message.
FILES = [
    (one("a.jpg,cat\nb.jpg,ant\n", "train/a.jpg train/b.jpg"), (["ant", "cat"], [1, 0])),
    (({"train.csv": "id,Label\na,10\nb,9\n"}, "x/a.jpg x/b.png", False), (["9", "10"], [1, 0])),
    (one("a,x\nb.jpg,y\n", "im/a.PNG im/b.JPG"), (["x", "y"], [0, 1])),
    (({"train.csv": ",image,label\n0,a.jpg,1.0\n1,b.jpg,0.0\n"}, "a.jpg b.jpg", False),
     (["0", "1"], [1, 0])),
    (one('a.jpg,"Apple,\xa0green"\nb.jpg,Äpfel;rot\n', "a.jpg b.jpg"),
     (["Apple,\xa0green", "Äpfel;rot"], [0, 1])),
    (one("a,9007199254740993\nb,9007199254740992\n", "a.jpg b.jpg"),
     (["9007199254740992", "9007199254740993"], [1, 0])),
    (one("0,dog\n", "0.png", **LISTS), (["dog", "bird", "red car", "cat"], [0])),
    (one("x/a.jpg,x\n", "train/x/a.jpg"), (["x"], [0])),
    *((({"train.csv": text}, "train/x/a.jpg", False), (["x"], [0]))
      for text in ('"', "a,b,c\n1\n", "\udcff", "image,labels\na.jpg,y\n")),
    *((many(text), SAID) for text in (
        COLUMNS,
        COLUMNS.replace(",", ", ").replace("\n", "\r\n"),
        COLUMNS.replace("\n", "\n\n"),
        NAMED,
        NAMED.replace("cat; red car", '"cat;\nred car;cat"'),
        "\ufeff" + NAMED,
        COLUMNS.replace(",1", ",1.0").replace(",0", ",0.0"),
        COLUMNS.replace(",1", ",True").replace(",0", ",False"),
        indexed(COLUMNS),
        indexed(indexed(NAMED)),
        indexed(COLUMNS).replace("image", "Unnamed: 0,image", 1).replace("train/", "7,train/"),
    )),
    (many(NAMED, **LISTS), (["dog", "bird", "red car", "cat"], [[2, 3], [], [0]])),
    *((many("\ufeff" + json.dumps(COCO), IMAGES, name), CAT_DOG)
      for name in ("train.json", "annotations/instances_train.json")),
    # one label for each image
    (one(""), "expected images in .*train.csv, but it lists none"),
    (one("a.jpg,\n", "a.jpg"), "train.csv:2: expected a label, got none"),
    (one("a.jpg,x,y\n", "a.jpg"), "train.csv:2: expected 2 cells, .*'image,label', got 3"),
    (one("a.jpg,x\nb.jpg,y\n", "a.jpg"), "lists 1 images that are not .* as b.jpg"),
    (one("a.jpg,x\na.jpg,y\n", "a.jpg"), "expected every image once, got .*a.jpg twice"),
    (one("a.jpg,x\n", "b.jpg"), "expected the image a.jpg .* got none"),
    (one("a.jpg,x\n", "one/a.jpg two/a.jpg"), "got one in each of .*one, .*two: write p"),
    (one("a,x\n", "a.jpg a.PNG"), "expected one image .*a, got .*: write the suffix"),
    (one("a.jpg,x;y\nb.jpg,x\nc.jpg,y\n", "a.jpg b.jpg c.jpg"), "label per image, got 'x;y'"),
    (one("a.jpg,1\nb.jpg,none\nc.jpg,2\n", "a.jpg b.jpg c.jpg"), (["1", "2", "none"], [0, 2, 1])),
    # a file beside class folders: of some of their images, or of others too, or with other labels
    *((one(rows, "train/x/a.jpg train/x/sub/c.jpg train/y/b.v1.JPG train/y/a.jpg"),
       (["x", "y"], [0, 0, 1, 1]))
      for rows in ("x/a,x\nc,x\nb.v1,y\ny/a,y\n", "b.v1,y\nnew.jpg,x\nx/new.jpg,y\n",
                   "y/c,y\na,z\n", "x\\a.jpg,x\n", "/from/train/y/a.jpg,y\n")),
    *((one(rows, "train/x/a.jpg train/x/sub/c.jpg train/y/b.jpg train/y/a.jpg"),
       rf"class folders \(x, y\), but .* gives {name} the label {label}: r")
      for rows, name, label in (("x/a.jpg,y\n", "x/a.jpg", "y"), ("new,x\nc,z\n", "c", "z"),
                                ("train\\x\\sub\\c.jpg,y\n", "train.*c.jpg", "y"))),
    *((one(f"a.jpg,{cells[0]}\nb.jpg,{cells[1]}\nc.jpg,x\n", "a.jpg b.jpg c.jpg"),
       "expected one spelling of each number in .*train.csv, got " + ", ".join(sorted(cells)))
      for cells in (("1", "01"), ("1.0", "1"), ("-2", "-02"), ("3.00", "3.0"))),
    *((({"train.csv": text}, images, False), f"train.csv: {HEADER} '{header}'")
      for images in ("a.jpg", "train/a.jpg")
      for text, header in (
          ("image,label,fold\na.jpg,x,1\n", "image,label,fold"),
          ("id,breed\na,x\n", "id,breed"),
          ("image;label\na.jpg;x\n", "image;label"),
          ("image\tlabel\na.jpg\tx\n", "image\\\\tlabel"),
          ("image,labels\na.jpg,x\n", "image,labels"),
          ("", ""),
      )),
    (({"train.csv": "image,label\n".encode("utf-16")}, "", False), "0xff .*: save it as UTF-8"),
    # paths that leave the data's directory
    *((one(f"{path},x\n", "a.jpg"), f"expected paths below .*, got .*{name}: .*--outside-paths")
      for path, name in (("/etc/a.jpg", "etc/a.jpg"), ("../b.jpg", "b.jpg"),
                         ("sub/../../b.jpg", "b.jpg"), ("../data2/b.jpg", "b.jpg"))),
    (coco(images=[{"id": 7, "file_name": "../../b.jpg"}], annotations=[]), "got .*/b.jpg: move"),
    # any number of labels
    (many("", name="other.csv"), "of train.csv, train.json, annotations/instances_train.json"),
    (many(""), "expected a header line .*, got ''"),
    (many("image;cat\na.png;1\n"), "with commas between the cells, got 'image;cat'"),
    (many("image,labels\n"), "lists none"),
    (many("image,labels\ntrain/a.png,\n"), "no image has any"),
    (many("image,cat,dog\ntrain/a.png,0,0\n"), "no image has any"),
    (many("image,cat,cat\n"), "expected every column once, got cat"),
    (many("image,cat\ntrain/a.png,1,1\n"), r"train.csv:2: expected 2 cells, .*, got 3"),
    (many("image,cat\ntrain/a.png,yes\n"), "train.csv:2: expected .* 0 or 1.*'image,cat'.*'yes'"),
    (many("image,cat\ntrain/x.png,1\n"), "the image train/x.png below .*, got none"),
    (many("image,labels\ntrain/a.png,['cat']\n"), r"got the list \['cat'\]: write"),
    (many('image,labels\n"train/a.png,cat\n'), "cannot read the labels in.*end of"),
    (many("image,Labels\ntrain/a.png,cat\n"), "one column, 'labels' in the header"),
    (many('image,cat\n"train/a\n.png",1\nx,1,1\n'), "train.csv:4: expected 2 cells"),
    (many("image,label\na.jpg,1\n"), "'image,label' is for one label .*: choose --loss"),
    (many(NAMED, **{"classes.txt": "cat\ndog\n"}), "not in classes.txt: red car"),
    (many("{", name="train.json"), "lists of images .*, got JSONDecodeError: Ex"),
    (many("[1]", name="train.json"), "expected lists of images .*, got values of other types"),
    *((coco(categories=[{"id": 9, "name": name}]), f"ValueError: a category whose name is {name!r}")
      for name in (None, " ")),
    (coco(annotations=[{"image_id": 7}]), "got KeyError: 'category_id'"),
    (coco(annotations=[{"image_id": 7, "category_id": [9]}]), "values of other types"),
    (coco(images=COCO["images"] * 2), "every id in images once, got 7, 3 twice"),
    (coco(categories=COCO["categories"][:1] * 2), "id in categories once, got 9 twice"),
    (coco(categories=[{"id": i, "name": i} for i in (2, "b")], annotations=[]), "got both"),
    (coco(annotations=[{"image_id": 1, "category_id": 2}]), "1 and category 2, which are not"),
    (coco(categories=[{"id": i, "name": "x"} for i in (2, 9)]), "category once, got x twice"),
]  # fmt: skip


def test_a_warning_counts_images_of_class_folders_that_a_file_does_not_list(tmp_path, caplog):
    rows = "image,label\nx/a,x\nsub/c.jpg,x\nval/d.jpg,y\n"
    write(tmp_path, {"train.csv": rows}, "train/x/a.jpg train/x/sub/c.jpg train/y/b.jpg")
    open_split(tmp_path, "train")
    assert "train.csv: 1 images are only in the folders, 1 only in the file" in caplog.text
    (tmp_path / "train.csv").write_text("image,label\nb,y\na,x\nc,x\n")
    caplog.clear()
    open_split(tmp_path, "train")
    assert caplog.text == ""


@pytest.mark.parametrize(("case", "expected"), FILES)
def test_files_give_these_labels_or_say_what_is_wrong(case, expected, tmp_path):
    files, images, multi = case
    write(tmp_path / "data", files, images)
    for name in ("b.jpg", "data2/b.jpg"):
        write(tmp_path, {name: ""})
    if isinstance(expected, tuple):
        assert found(tmp_path / "data", multi=multi) == expected
    else:
        with pytest.raises(DataError, match=expected):
            found(tmp_path / "data", multi=multi)


ROWS = [
    (INT, [2, 10**9, 2], "2 1000000000", [0, 1, 0]),
    (INT, [3 * 10**7, 10, 9], "9 10 30000000", [2, 1, 0]),
    (FLOAT, [1, 0, 1], "0 1", [1, 0, 1]),
    (BOOL, [True, False, True], "0 1", [1, 0, 1]),
    (datasets.Value("uint8"), [2, 0, 2], "0 2", [1, 0, 1]),
    (datasets.Value("large_string"), ["b", "a", "b"], "a b", [1, 0, 1]),
    (TEXT, ["b", "a10", "a9"], "a10 a9 b", [2, 0, 1]),
    (TEXT, ["be\u0301", "b\xe9", "a"], "a b\xe9", [1, 1, 0]),
    (datasets.ClassLabel(names=["be\u0301", "a"]), [0, 1, 0], "b\xe9 a", [0, 1, 0]),
    (LIST(INT), [[1, 0, 0], [0, 0, 0], [1, 0, 1]], "0 1 2", [[0], [], [0, 2]]),
    (LIST(INT), [[1, 0], [0, 1], [1, 0]], "0 1", [[0], [1], [0]]),
    (LIST(INT, length=3), [[1, 0, 0], [0, 0, 0], [1, 0, 1]], "0 1 2", [[0], [], [0, 2]]),
    (datasets.LargeList(BOOL), [[True, False], [False] * 2], "0 1", [[0], []]),
    (LIST(FLOAT), [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], "0 1", [[0], [], [0, 1]]),
    (LIST(INT), [[1], [0], [0]], "0 1", [[1], [0], [0]]),
    (LIST(INT), [[0, 7], [], [7]], "0 7", [[0, 1], [], [1]]),
    (LIST(TEXT), [["b", "a"], [], ["b"]], "a b", [[0, 1], [], [1]]),
    (LIST(NAMES), [[2, 0], [], [1]], "a b c", [[0, 2], [], [1]]),
    (datasets.Value("binary"), [b"a"] * 3, r"index of a class .*Value\('binary'", None),
    (LIST(LIST(INT)), [[[1]], [[0]]], "index of a class .*value ListType", None),
    (FLOAT, [0.5, 1, 2], r"index of a class .*Value\('float32'", None),
    (TEXT, ["a", " ", "b"], r"index of a class .*Value\('string'", None),
    (INT, [0, 1, None], r"index of a class .* with the value None:", None),
    (TEXT, ["a", None], r"index of a class .* with the value None:", None),
    (LIST(TEXT), [["a"], None], r"index of a class .* with the value None:", None),
    (FLOAT, [0, 2.0**63], r"index of a class .* with the value 9\.2", None),
    (INT, [0, 1, -1], "labels from 0 to 1 in .* from -1 to 1: is it a split without", None),
    (TEXT, ["1.0", "nan", "2.0"], "expected a number for each label in column .*, got nan:", None),
    (TEXT, ["1", "None", "2"], "expected a number for each label in column .*, got None:", None),
    (
        datasets.ClassLabel(names=["a", "\xe9", "e\u0301"]),
        [0, 1],
        "class once, got \xe9 twice",
        None,
    ),
    (TEXT, ["01", "1", "a"], "one spelling of each number in column .*, got 01, 1", None),
    (LIST(INT), [[0, 0], [0, 0]], "labels in column .*, but no image has any: is it a split", None),
    (LIST(TEXT), [[], []], "labels in column .*, but no image has any: is it a split", None),
    (LIST(NAMES), [[0, 1], [1, 1]], "class of an image once .* twice in row 1", None),
    (LIST(INT), [[0, 1, 0], [1, 0]], "class of an image once .* twice in row 0", None),
    (NAMES, [], r"cannot open the data set .*IndexError", None),
]


@pytest.mark.parametrize(("kind", "labels", "expected", "indices"), ROWS, ids=str)
def test_rows_of_a_table_give_these_labels_or_say_what_is_wrong(
    kind, labels, expected, indices, tmp_path
):
    write_rows(tmp_path / "set", kind, labels)
    if indices is not None:
        assert found(tmp_path / "set") == (expected.split(), indices)
    else:
        with pytest.raises(DataError, match=expected):
            found(tmp_path / "set", label_column="label")


@pytest.mark.parametrize(
    ("cells", "separator", "classes"),
    [
        (["red car", "dog", "New York;dog"], None, "New York,dog,red car"),
        (["mildew", "complex", "mildew complex"], None, "complex,mildew,mildew complex"),
        (["mildew", "complex", "mildew complex"], " ", "complex,mildew"),
        (["a", "b | a"], " | ", "a,b"),
        (["a", "b|a"], "|", "a,b"),
    ],
)
def test_a_separator_is_taken_or_assumed_and_shown(cells, separator, classes, tmp_path):
    names = [f"{number}.png" for number in range(len(cells))]
    write(tmp_path, {}, " ".join(names))
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "labels"), *zip(names, cells, strict=True)])
    options = DataOptions(label_separator=separator)
    data = open_split(tmp_path, "train", multi=True, options=options)
    expected, split = classes.split(","), repr(separator or ";")
    assert data.classes == expected
    shown = f"{len(expected)} classes ({', '.join(expected)}; labels split at {split})"
    assert data.labels.describe() == shown
    (tmp_path / "map.txt").write_text("\n".join(reversed(expected)))
    options = DataOptions(label_separator=separator, class_map=str(tmp_path / "map.txt"))
    mapped = open_split(tmp_path, "train", multi=True, options=options)
    assert mapped.classes == expected[::-1]
    assert torch.equal(mapped.targets, data.targets.flip(1))


def test_paths_may_leave_the_directory_if_an_option_says_so(tmp_path):
    table = f"image,label\n../a.jpg,x\n{tmp_path}/b.jpg,y\n"
    write(tmp_path, {"data/train.csv": table}, "a.jpg b.jpg")
    data = open_split(tmp_path / "data", "train", options=DataOptions(outside_paths=True))
    assert [Path(path) for path in data.paths] == [tmp_path / "a.jpg", tmp_path / "b.jpg"]
    # A link's parent is another folder than the one that the path seems to name.
    table = "image,label\nlink/../a.jpg,x\n"
    write(tmp_path, {"linked/train.csv": table}, "far/a.jpg far/x/y")
    (tmp_path / "linked/link").symlink_to(tmp_path / "far/x")
    with pytest.raises(DataError, match=r"the image link/\.\./a\.jpg below .*, got none"):
        found(tmp_path / "linked")


def test_paths_and_names_are_found_in_both_forms_of_unicode(tmp_path):
    composed, apart = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    for split, text, file in (("train", composed, apart), ("val", apart, composed)):
        table = f"image,labels\n{split}/{text}/{text},{text}\n"
        write(tmp_path, {f"{split}.csv": table}, f"{split}/{file}/{file}.png")
        assert found(tmp_path, split, multi=True) == ([composed], [[0]])


def folders(root, split, *names):
    write(root, {}, " ".join(f"{split}/{name}/{name}.png" for name in names))


# What writes both splits -> the classes of both and the labels of val, or a message.
SPLITS = [
    (lambda root, split: folders(root, split, *{"train": "abc", "val": "bcd"}[split]),
     "same class folders .*only in train: a; only in val: d: add"),
    (lambda root, split: folders(root, split, *{"train": "abc", "val": "bc"}[split]),
     ("a b c", [1, 2])),  # a class may lack images to validate
    (lambda root, split: folders(root, split, "a"), "at least two class folders .* got a: add"),
    (lambda root, split: write_rows(root / split, TEXT, {"train": "ab", "val": "bb"}[split]),
     ("a b", [1, 1])),
    (lambda root, split: write_rows(root / split, TEXT, {"train": "ab", "val": "cb"}[split]),
     r"labels in .*val.* \(such as a, b\), got also c: leave"),
    (lambda root, split: write_rows(root / split, datasets.ClassLabel(names=[*split[:2]]), [0, 1]),
     "classes .*: give both label columns one type ClassLabel"),
    # Lists of 0 and 1 are read as those of the split to train on.
    (lambda root, split: write_rows(
        root / split, LIST(INT), {"train": [[0, 2], [1]], "val": [[0, 1], [1, 0]]}[split]),
     ("0 1 2", [[0, 1], [0, 1]])),
    (lambda root, split: write_rows(
        root / split, LIST(INT), {"train": [[0, 1], [1, 0]], "val": [[0, 1], [1]]}[split]),
     "expected lists of 2 numbers 0 or 1 in .*val.*, as the images to train on have"),
    (lambda root, split: write(
        root, {f"{split}.csv": f"image,{'cat,dog' if split == 'train' else 'dog,cat'}\na.png,1,0"},
        "a.png"), ("cat dog", [[1]])),
    (lambda root, split: write(
        root, {f"{split}.csv": f"image,labels\na.png,{'cat;dog' if split == 'train' else 'dog'}"},
        "a.png"), ("cat dog", [[1]])),
]  # fmt: skip


@pytest.mark.parametrize(("write_split", "expected"), SPLITS)
def test_both_splits_number_their_labels_alike(write_split, expected, tmp_path):
    for split in ("train", "val"):
        write_split(tmp_path, split)
    multi = None if list(tmp_path.glob("*/state.json")) else (tmp_path / "val.csv").exists()

    def splits():
        train = open_split(tmp_path, "train", multi=multi)
        val = open_split(tmp_path, "val", multi=multi, like=train.labels)
        return train, _with_classes_of(train, val)

    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            splits()
    else:
        train, val = splits()
        assert train.classes == val.classes == expected[0].split()
        labels = [val.labels.of_image(image) for image in range(len(val))]
        assert (labels if val.multi else [label for (label,) in labels]) == expected[1]


def test_many_labels_take_memory_by_their_number_and_are_zeros_and_ones_when_read():
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 4, 10_000)
    indices = np.concatenate([generator.permutation(50)[:n] for n in lengths])
    labels = Labels(tuple(map(str, range(50))), indices, lengths.cumsum())
    expected = np.zeros((10_000, 50), np.uint8)
    expected[np.repeat(np.arange(10_000), lengths), indices] = 1
    data = ImageDataset("train", Paths([]), labels)
    assert np.array_equal(data.targets, expected)
    assert np.array_equal(labels.counts, expected.sum(0))
    for image in (0, 1, 4095, 4096, 9999):
        assert labels.of_image(image) == expected[image].nonzero()[0].tolist()
        assert torch.equal(labels[image], torch.from_numpy(expected[image]).float())
    turned = ImageDataset("train", Paths([]), labels.arranged(labels.names[::-1]))
    assert np.array_equal(turned.targets, expected[:, ::-1])


NUMBERED = sorted(map(str, range(11)))
E = "be\u0301"
SAME, SOME = {"policy": "same"}, {"policy": "outputs"}
# Names of outputs, their number or None for that of the data; the data's classes; order or message.
MATCHES = [
    (None, None, "ab", SAME, None),
    (None, None, ["n01440764", "n02119789"], SAME, None),
    (None, None, sorted(map(str, range(10))), SAME, None),
    (None, None, [*map(str, range(11))], SAME, None),
    (None, None, ["①", "②", "m²"], SAME, None),
    ("cab", 3, "abc", SAME, [1, 2, 0]),
    ("abc", 3, "abc", SAME, None),
    ([E, "a"], 2, ["a", "b\xe9"], SAME, [1, 0]),
    ("cab", 3, "cb", SOME, [0, 2]),
    (["2", "0", "1"], 3, "012", SAME, [1, 2, 0]),
    ("cab", 3, "012", SAME, "the labels of the data are numbers"),
    ("cab", 3, "ab", SAME, "have 3 classes, the data 2"),
    ("cab", 3, "abx", SAME, "differ: only the weights have c; only the data have x"),
    ("cab", 3, "abx", SOME, "but the data also have x"),
    ("cab", 3, "201", SOME, [2, 0, 1]),
    ("cab", 3, "20", SOME, [2, 0]),
    ("cab", 3, "013", SOME, "but the data also have 0, 1, 3"),
    ("cab", 3, ["0", "1", "01"], SOME, "but the data also have 0, 01, 1"),
    ("cab", 3, "a1", SOME, "but the data also have 1"),
    ("210", 3, "01", SOME, [2, 1]),
    (["1", "2", "other"], 3, "12", SOME, [0, 1]),
    (None, 5, "13", SOME | {"numbered": True}, [1, 3]),
    (None, 5, "13", SOME, "have 5 classes, the data 2"),
    (None, 5, "17", SOME | {"numbered": True}, "but the data also have 7"),
    # Lists of two numbers, 0 or 1, cannot be those of five classes.
    ("abcde", 5, "01", SOME | {"whole": True}, r"have 5 classes, the data 2 \(0, 1\)"),
    ("01234", 5, "01", SOME | {"whole": True}, r"have 5 classes, the data 2 \(0, 1\)"),
    ("ba", 2, "01", SOME | {"whole": True}, None),
]  # fmt: skip


@pytest.mark.parametrize(("trained", "count", "names", "options", "expected"), MATCHES, ids=str)
def test_classes_and_outputs_are_matched(trained, count, names, options, expected):
    outputs = list(trained) if trained else count or len(names)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            match(list(names), outputs, **options)
        if options == SAME:
            assert re.search(expected, match(names, outputs, "new head").new_head or "")
    else:
        assert match(list(names), outputs, **options).order == expected


@pytest.mark.parametrize(
    "names",
    [NUMBERED, ["Banana", "apple"], ["a", "a10", "a9"], ["A", "a"], ["x1y2", "x1y10", "x02"]],
    ids=str,
)
def test_two_orders_of_names_are_refused_without_names_of_outputs(names, tmp_path):
    names, message = sorted(names), re.escape(f"{', '.join(sorted(names))} (sorted as here")
    for policy in ("same", "new head", "outputs"):
        with pytest.raises(ConfigError, match=message) as error:
            match(names, len(names), policy)
    folders(tmp_path, "train", *names)
    _, theirs = find_images_and_targets(str(tmp_path / "train"))
    if len({name.lower() for name in names}) == len(names):  # otherwise timm's order is random
        assert f"{', '.join(theirs)} (sorted as in timm)" in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbfred car\r\n\nblue\n", ["red car", "blue"]),
        ("cafe\u0301\n".encode(), ["caf\xe9"]),
        (b"a\nb\na\n", "every class once, got a twice"),
        (b"\n", "got no name"),
        (b"\xe9", "cannot read the classes"),
    ],
)
def test_a_file_of_names_has_one_in_each_line(tmp_path, content, expected):
    (tmp_path / "names.txt").write_bytes(content)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            read_names(tmp_path / "names.txt")
    else:
        assert read_names(tmp_path / "names.txt") == expected


def test_lists_of_zeros_and_ones_are_named_as_such(tmp_path):
    write_rows(tmp_path / "set", LIST(INT), [[0, 1], [1, 0]])
    assert open_split(tmp_path / "set", "train", multi=True).labels.reading == HOT


def test_the_rarest_label_of_an_image_counts():
    one = Labels(("a", "b"), np.array([0, 1, 0, 0]))
    assert one.rarities.tolist() == [1 / 3, 1, 1 / 3, 1 / 3]
    rows = [[0], [], [0, 2], [2, 0, 1], [0], []]
    flat, ends = [label for row in rows for label in row], np.cumsum([*map(len, rows)])
    several = Labels(("a", "b", "c", "never"), np.array(flat), ends)
    assert several.rarities.tolist() == [1 / 4, 1 / 4, 1 / 2, 1, 1 / 4, 1 / 4]
