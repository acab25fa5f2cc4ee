"""Labels of one class an image from a CSV file, as Kaggle gives them."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.engine.runs import eval_main, train_main, write_images
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.sources import open_split
from tresnet.errors import DataError


def write(root: Path, table: str, images: str = "", split: str = "train") -> Path:
    root.mkdir(exist_ok=True)
    (root / f"{split}.csv").write_text(table)
    for name in images.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name)
    return root


def opened(root: Path, split: str = "train"):
    dataset = open_split(str(root), split)
    paths = [Path(path).relative_to(root).as_posix() for path in dataset.paths]
    return paths, [dataset.classes[label] for label in dataset.targets], dataset.classes


@pytest.mark.parametrize(
    ("table", "images", "classes"),
    [
        (
            "image,label\ntrain/a.jpg,cat\ntrain/b.jpg,ant\n",
            "train/a.jpg train/b.jpg",
            "ant cat",
        ),
        ("image_id,label\na.jpg,cat\nb.jpg,ant\n", "train/a.jpg train/b.jpg", "ant cat"),
        ("id,Label\na,10\nb,9\n", "train_images/a.jpg train_images/b.png", "9 10"),
        (",image,label\n0,a.jpg,1.0\n1,b.jpg,0.0\n", "a.jpg b.jpg", "0 1"),
        ('image,label\na.jpg,"Apple, green"\nb.jpg,Äpfel;rot\n', "a.jpg b.jpg", None),
    ],
)
def test_labels_come_from_a_file(table, images, classes, tmp_path):
    root = write(tmp_path / "data", table, images)
    found, labels, names = opened(root)
    assert found == images.split()
    assert names == (["Apple, green", "Äpfel;rot"] if classes is None else classes.split())
    assert sorted(labels, key=names.index) == names


def test_a_list_of_classes_fixes_their_order(tmp_path):
    root = write(tmp_path, "image,label\na.jpg,cat\n", "a.jpg")
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    assert opened(root) == (["a.jpg"], ["cat"], ["dog", "cat"])
    (tmp_path / "classes.txt").write_text("dog\n")
    with pytest.raises(DataError, match=r"labels that are not in .*classes.txt: cat"):
        opened(root)


@pytest.mark.parametrize(
    ("table", "images", "message"),
    [
        ("", "", "expected images in .*train.csv, but it lists none"),
        ("a.jpg,\n", "a.jpg", "train.csv:2: expected a label, got none"),
        ("a.jpg,x,y\n", "a.jpg", "train.csv:2: expected 2 cells, got 3"),
        (
            "a.jpg,x\nb.jpg,y\n",
            "a.jpg",
            "lists 1 images that are not .* as b.jpg",
        ),
        (
            "a.jpg,x\na.jpg,y\n",
            "a.jpg",
            "expected every image once, got .*a.jpg twice",
        ),
        (
            "a.jpg,x\n",
            "b.jpg",
            "expected the image a.jpg .* got none",
        ),
        (
            "a.jpg,x\n",
            "one/a.jpg two/a.jpg",
            "got one in each of .*one, .*two: write p",
        ),
        ("a,x\n", "a.jpg a.png", "expected one image .*a, got .*: write the suffix"),
        ("/a.jpg,x\n", "a.jpg", "expected paths below .*, got /a.jpg"),
        (
            "a.jpg,x;y\nb.jpg,x\nc.jpg,y\n",
            "a.jpg b.jpg c.jpg",
            "one label per image, got 'x;y'",
        ),
        (
            "x/a.jpg,z\n",
            "train/x/a.jpg",
            r"class folders \(x\), and .* labels z: r",
        ),
    ],
)
def test_bad_files_are_refused(table, images, message, tmp_path):
    write(tmp_path, f"image,label\n{table}", images)
    with pytest.raises(DataError, match=message):
        open_split(str(tmp_path), "train")


def test_a_file_of_many_labels_without_folders_is_explained(tmp_path):
    write(tmp_path, "image,labels\na.jpg,x\n", "train/a.jpg")
    with pytest.raises(DataError, match=r"no class folders.*if its header is 'image,label'"):
        open_split(str(tmp_path), "train")


@pytest.mark.parametrize("table", ["image,label\nx/a.jpg,x\n", '"', "a,b,c\n1\n", "\udcff"])
def test_class_folders_stay_class_folders_beside_other_files(table, tmp_path):
    root = write(tmp_path, "", "train/x/a.jpg")
    (root / "train.csv").write_bytes(table.encode(errors="surrogateescape"))
    assert opened(root) == (["train/x/a.jpg"], ["x"], ["x"])


def test_files_of_one_label_and_of_many_are_kept_apart(tmp_path):
    write(tmp_path, "image,label\na.jpg,1\n", "a.jpg")
    with pytest.raises(DataError, match="'image,label' is for one label per image: choose --loss"):
        open_split(str(tmp_path), "train", multi=True)
    write(tmp_path, "image,labels\na.jpg,x\n")
    assert open_split(str(tmp_path), "train", multi=True).classes == ["x"]


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
