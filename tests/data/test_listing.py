"""Labels that CSV files or COCO's JSON list: one an image, as Kaggle gives them, or any number."""

import csv
import json
import unicodedata
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.engine.runs import eval_main, train_main, write_images
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.folder import align_classes
from tresnet.data.loaders import Loader
from tresnet.data.sources import open_split
from tresnet.data.transforms import eval_sampler
from tresnet.errors import DataError
from tresnet.settings import DataOptions, EvalTransform


def write(root: Path, table: str, images: str = "", name: str = "train.csv") -> Path:
    """Write a file of labels, and images of 6 x 5 pixels."""
    root.mkdir(exist_ok=True)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(table.encode(errors="surrogateescape"))
    for image in images.split():
        (root / image).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (6, 5)).save(root / image)
    return root


def write_labels(root: Path, labels: list[str]) -> None:
    """Write images, and a file whose column `labels` has these cells."""
    names = [f"{number}.png" for number in range(len(labels))]
    write(root, "", " ".join(names))
    with (root / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "labels"), *zip(names, labels, strict=True)])


def opened(root: Path, split: str = "train", **options):
    return open_split(root, split, multi=True, options=DataOptions(**options))


def single(root: Path):
    """Return the paths, the images' labels and the classes of data with one label an image."""
    dataset = open_split(root, "train")
    paths = [Path(path).relative_to(root).as_posix() for path in dataset.paths]
    return paths, [dataset.classes[label] for label in dataset.targets], dataset.classes


@pytest.mark.parametrize(
    ("table", "images", "classes"),
    [
        ("image,label\ntrain/a.jpg,cat\ntrain/b.jpg,ant\n", "train/a.jpg train/b.jpg", "ant cat"),
        ("image_id,label\na.jpg,cat\nb.jpg,ant\n", "train/a.jpg train/b.jpg", "ant cat"),
        ("id,Label\na,10\nb,9\n", "train_images/a.jpg train_images/b.png", "9 10"),
        (",image,label\n0,a.jpg,1.0\n1,b.jpg,0.0\n", "a.jpg b.jpg", "0 1"),
        ('image,label\na.jpg,"Apple,\xa0green"\nb.jpg,Äpfel;rot\n', "a.jpg b.jpg", None),
    ],
)
def test_labels_come_from_a_file(table, images, classes, tmp_path):
    found, labels, names = single(write(tmp_path / "data", table, images))
    assert found == images.split()
    assert names == (["Apple,\xa0green", "Äpfel;rot"] if classes is None else classes.split())
    assert sorted(labels, key=names.index) == names


IMAGES = "train/a.png train/b.png train/sub/c.png"
COLUMNS = "image,cat,dog,red car\ntrain/a.png,1,0,1\ntrain/b.png,0,0,0\ntrain/sub/c.png,0,1,0\n"
NAMED = "image,labels\ntrain/a.png,cat; red car\ntrain/b.png,\ntrain/sub/c.png,dog\n"
COCO = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 3, "file_name": "b.png"}],
    "categories": [{"id": 9, "name": "dog"}, {"id": 2, "name": "cat"}],
    "annotations": [{"image_id": 7, "category_id": category} for category in (9, 9, 2)],
}


def indexed(text):
    """Return the table as pandas writes it, with an index column that has no name."""
    lines = text.splitlines()
    return "\n".join([f",{lines[0]}", *(f"{i},{line}" for i, line in enumerate(lines[1:]))])


@pytest.mark.parametrize(
    "text",
    [
        COLUMNS,
        COLUMNS.replace(",", ", ").replace("\n", "\r\n"),
        COLUMNS.replace("\n", "\n\n"),
        NAMED,
        NAMED.replace("cat; red car", '"cat;\nred car"'),
        "\ufeff" + NAMED,
        COLUMNS.replace(",1", ",1.0").replace(",0", ",0.0"),
        COLUMNS.replace(",1", ",True").replace(",0", ",False"),
        indexed(COLUMNS),
        indexed(indexed(NAMED)),
        indexed(COLUMNS).replace("image", "Unnamed: 0,image", 1).replace("train/", "7,train/"),
    ],
)
def test_both_tables_say_the_same(tmp_path, text):
    dataset = opened(write(tmp_path, text, IMAGES))
    assert dataset.classes == ["cat", "dog", "red car"]
    assert [Path(path).name for path in dataset.paths] == ["a.png", "b.png", "c.png"]
    assert dataset[2][0].mode == "RGB"
    dataset.transform = eval_sampler(EvalTransform(input_size=(5, 6)))
    crops, labels = next(iter(Loader(dataset, 3, training=False)))
    assert crops.render(torch.device("cpu")).shape == (3, 3, 5, 6)
    assert labels.dtype == torch.float32
    assert labels.tolist() == dataset.targets.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("separator", [" ", ",", "|", "/", "\t", ", ", " | ", "+", "&"])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "labels",
    [
        ["mildew", "complex", "mildew complex"],
        ["clear primary", "haze", "clear primary water haze"],
        ["clear primary", "clear primary water", "clear water", "primary water"],
        ["a", "b", "c", "a b", "b c", "a c", "a b c"],
    ],
)
def test_another_separator_is_named_and_taken(tmp_path, separator, order, labels):
    cells = [label.replace(" ", separator) for label in labels][::order]
    write_labels(tmp_path, cells)
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
def test_names_may_hold_a_space_or_another_separator(tmp_path, labels):
    write_labels(tmp_path, labels)
    assert opened(tmp_path).classes == sorted({n for label in labels for n in label.split(";")})


def test_a_list_of_classes_fixes_their_order_and_decides_about_a_separator(tmp_path):
    write_labels(tmp_path, ["hot", "dog", "hot dog"])
    with pytest.raises(DataError, match="by --label-separator ' '; choose one"):
        opened(tmp_path)
    (tmp_path / "names.txt").write_text("dog\nhot dog\nhot\n")
    mapped = opened(tmp_path, class_map=str(tmp_path / "names.txt"))
    assert mapped.classes == ["dog", "hot dog", "hot"]
    assert mapped.targets.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    (tmp_path / "classes.txt").write_text("\ufeffdog\nbird\nhot dog\nhot\n", encoding="utf-8")
    listed = opened(tmp_path)
    assert listed.classes == ["dog", "bird", "hot dog", "hot"]
    assert listed.targets.tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]]
    write(tmp_path, "image,label\n0,dog\n")
    assert single(tmp_path) == (["0.png"], ["dog"], ["dog", "bird", "hot dog", "hot"])


def test_paths_and_names_are_found_in_both_forms_of_unicode(tmp_path):
    composed, apart = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    write(tmp_path, f"image,labels\ntrain/{composed}.png,{composed}\n", f"train/{apart}.png")
    write(tmp_path, f"image,labels\nval/{apart},{apart}\n", f"val/{composed}.png", "val.csv")
    train, val = (opened(tmp_path, split) for split in ("train", "val"))
    align_classes(train, val)
    assert train.classes == [composed]
    assert [split[0][0].size for split in (train, val)] == [(6, 5)] * 2


@pytest.mark.parametrize("place", ["train.json", "annotations/instances_train.json"])
def test_cocos_categories_are_in_the_order_of_their_ids_and_its_images_in_one_folder(
    tmp_path, place
):
    dataset = opened(write(tmp_path, "\ufeff" + json.dumps(COCO), IMAGES, place))
    assert dataset.classes == ["cat", "dog"]
    assert dataset.targets.tolist() == [[1, 1], [0, 0]]
    write(tmp_path, json.dumps(COCO), name="val.json")  # other images may have the same names
    with pytest.raises(DataError, match=r"lists 2 images that are not below .*val, such as a\.png"):
        opened(tmp_path, "val")


@pytest.mark.parametrize(
    ("rows", "images", "message"),
    [
        ("", "", "expected images in .*train.csv, but it lists none"),
        ("a.jpg,\n", "a.jpg", "train.csv:2: expected a label, got none"),
        ("a.jpg,x,y\n", "a.jpg", "train.csv:2: expected 2 cells, got 3"),
        ("a.jpg,x\nb.jpg,y\n", "a.jpg", "lists 1 images that are not .* as b.jpg"),
        ("a.jpg,x\na.jpg,y\n", "a.jpg", "expected every image once, got .*a.jpg twice"),
        ("a.jpg,x\n", "b.jpg", "expected the image a.jpg .* got none"),
        ("a.jpg,x\n", "one/a.jpg two/a.jpg", "got one in each of .*one, .*two: write p"),
        ("a,x\n", "a.jpg a.png", "expected one image .*a, got .*: write the suffix"),
        ("/a.jpg,x\n", "a.jpg", "expected paths below .*, got /a.jpg"),
        ("a.jpg,x;y\nb.jpg,x\nc.jpg,y\n", "a.jpg b.jpg c.jpg", "one label per image, got 'x;y'"),
        ("x/a.jpg,z\n", "train/x/a.jpg", r"class folders \(x\), and .* labels z: r"),
    ],
)
def test_faulty_files_of_one_label_are_refused(rows, images, message, tmp_path):
    write(tmp_path, f"image,label\n{rows}", images)
    with pytest.raises(DataError, match=message):
        open_split(tmp_path, "train")


def coco(**changes):
    return "train.json", json.dumps(COCO | changes)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.csv", "", "one of train.csv, train.json, annotations/instances_train.json"),
        ("train.csv", "", "expected a header line"),
        ("train.csv", "image,labels\n", "lists none"),
        ("train.csv", "image,labels\ntrain/a.png,\n", "no image has any"),
        ("train.csv", "image,cat,cat\n", "expected every column once, got cat"),
        ("train.csv", "image,cat\ntrain/a.png,1,1\n", r"train.csv:2: expected 2 cells, got 3"),
        ("train.csv", "image,cat\ntrain/a.png,yes\n", "train.csv:2: expected 0 or 1.*'yes'"),
        ("train.csv", "image,cat\ntrain/x.png,1\n", "the image train/x.png below .*, got none"),
        ("train.csv", "image,labels\ntrain/a.png,['cat']\n", r"got the list \['cat'\]: write"),
        ("train.csv", 'image,labels\n"train/a.png,cat\n', "cannot read the labels in.*end of"),
        ("train.csv", "image,Labels\ntrain/a.png,cat\n", "one column, 'labels' in the header"),
        ("train.csv", 'image,cat\n"train/a\n.png",1\nx,1,1\n', "train.csv:4: expected 2 cells"),
        ("train.csv", "image,label\na.jpg,1\n", "'image,label' is for one label .*: choose --loss"),
        ("classes.txt", "cat\ndog\n", "not in .*classes.txt: red car"),
        ("classes.txt", "\udce9", "cannot read the classes in .*classes.txt"),
        ("classes.txt", "cat\ndog\nred car\ncat", "every class once"),
        ("train.json", "{", "train.json: expected lists of images .*, got JSONDecodeError: Ex"),
        ("train.json", "[1]", "expected lists of images .*, got values of other types"),
        (*coco(annotations=[{"image_id": 7}]), "got KeyError: 'category_id'"),
        (*coco(annotations=[{"image_id": 7, "category_id": [9]}]), "got values of other types"),
        (*coco(images=COCO["images"] * 2), "every id in images once, got 7, 3 twice"),
        (*coco(categories=COCO["categories"][:1] * 2), "id in categories once, got 9 twice"),
        (*coco(categories=[{"id": i, "name": i} for i in (2, "b")], annotations=[]), "got both"),
        (*coco(annotations=[{"image_id": 1, "category_id": 2}]), "1 and category 2, which are not"),
        (*coco(categories=[{"id": i, "name": "x"} for i in (2, 9)]), "category once, got x twice"),
    ],
)
def test_faulty_files_of_many_labels_are_refused(tmp_path, name, text, message):
    if name == "classes.txt":
        write(tmp_path, NAMED)
    write(tmp_path, text, IMAGES, name)
    with pytest.raises(DataError, match=message):
        opened(tmp_path)


def test_splits_must_number_their_labels_alike(tmp_path):
    write(tmp_path, "image,cat,dog\ntrain/a.png,1,0\n", "train/a.png")
    write(tmp_path, "image,dog,cat\nval/a.png,1,0\n", "val/a.png", "val.csv")
    train, val = (opened(tmp_path, split) for split in ("train", "val"))
    text = "same order of classes in train and val, got cat, dog; dog, cat: list"
    with pytest.raises(DataError, match=text):
        align_classes(train, val)
    align_classes(train, train)
    write(tmp_path, "image,labels\nval/a.png,bird;cat\n", name="val.csv")
    with pytest.raises(DataError, match=r"only in train: dog; only in val: bird: list all .*txt"):
        align_classes(train, opened(tmp_path, "val"))


def test_a_file_of_many_labels_without_folders_is_explained(tmp_path):
    write(tmp_path, "image,labels\na.jpg,x\n", "train/a.jpg")
    with pytest.raises(DataError, match=r"no class folders.*if its header is 'image,label'"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize("table", ["image,label\nx/a.jpg,x\n", '"', "a,b,c\n1\n", "\udcff"])
def test_class_folders_stay_class_folders_beside_other_files(table, tmp_path):
    assert single(write(tmp_path, table, "train/x/a.jpg")) == (["train/x/a.jpg"], ["x"], ["x"])


def test_a_run_on_a_file_is_one_on_folders(tmp_path, capsys):
    """The files of labels list the images of class folders, which lie in one folder here."""
    write_images(tmp_path / "folders", train=12, val=6)
    (tmp_path / "listed" / "images").mkdir(parents=True)
    for split in ("train", "val"):
        rows = ["image,label"]
        for path in sorted((tmp_path / "folders" / split).glob("*/*")):
            name = f"{split}_{path.parent.name}_{path.name}"
            path.rename(tmp_path / "listed" / "images" / name)
            (path.parent / path.name).hardlink_to(tmp_path / "listed" / "images" / name)
            rows.append(f"images/{name},{path.parent.name}")
        (tmp_path / "listed" / f"{split}.csv").write_text("\n".join(rows))
    options = f"""--recipe digits --epochs 1 --batch-size 4 --input-size 12 --workers 0 --device cpu
        --width-factor 0.125 --layers 1 1 1 1 --runs {tmp_path} --no-progress"""
    rows = []
    for name in ("folders", "listed"):
        command = f"--data {tmp_path / name} --name run_{name} {options}"
        assert train_main(command.replace("\n", " ").split()) == 0
        log = (tmp_path / f"run_{name}" / "log.jsonl").read_text().splitlines()
        rows.append(json.loads(log[-1]))
    for column in ("val_loss", "val_top1"):
        assert rows[0][column] == rows[1][column]
    listed = (tmp_path / "listed" / "val.csv").read_text().splitlines()
    nameless = tmp_path / "nameless.pth"
    save_checkpoint(create(weights=tmp_path / "run_listed" / "best.safetensors"), nameless)
    command = f"--data {tmp_path / 'listed'} --weights {nameless} --device cpu --workers 0"
    assert eval_main(command) == 0  # sorted labels, as of class folders
    assert f"top-1 {rows[1]['val_top1']:.2f} %" in capsys.readouterr().out
    some = [row for row in listed if not row.endswith("red")]
    (tmp_path / "listed" / "val.csv").write_text("\n".join(some))
    assert eval_main(command) == 2
    assert "the weights have 3 classes, the data 2 (blue, green)" in capsys.readouterr().err
    weights = tmp_path / "run_listed" / "best.safetensors"
    command = f"--data {tmp_path / 'listed'} --weights {weights} --device cpu --workers 0"
    assert eval_main(command) == 0
    assert "the data have 2 of the weights' 3 classes" in capsys.readouterr().out
