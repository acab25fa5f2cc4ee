import csv
import dataclasses
import json
import shutil
from collections import Counter

import pytest
import timm
import torch
from timm.data import create_transform, resolve_data_config
from torch.nn import functional
from torchvision.datasets import ImageFolder

from tests.engine.runs import CLASSES, eval_main, write_images
from tests.toys import smallest
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.save import save_checkpoint
from tresnet.data.sources import open_split
from tresnet.data.transforms import eval_transform
from tresnet.engine.evaluate_weights import EvalConfig, run
from tresnet.errors import ConfigError, TResNetError
from tresnet.peers import open_pretrained
from tresnet.settings import EvalTransform
from tresnet.settings.fields import replace


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    model = smallest()
    model.pretrained_cfg |= {"input_size": (3, 12, 12), "crop_pct": 1.0}
    # classes in another order than the folders'
    save_checkpoint(model, path, metadata={"classes": ["red", *CLASSES[:2]]})
    return path


@pytest.fixture(scope="module")
def config(data, weights):
    return EvalConfig(data=str(data), weights=str(weights), workers=0, device="cpu", batch_size=4)


@pytest.fixture(scope="module")
def plain(config):
    return run(config)


def test_the_result_names_what_was_measured_and_on_what(config, tmp_path, capsys):
    config = dataclasses.replace(config, output=tmp_path / "result.json")
    result = run(config)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert written["images"] == 11
    assert written["images_per_s"] > 0
    assert written["top5"] is None
    assert written["options"]["input_size"] == 12
    assert (written["options"]["crop_pct"], written["options"]["crop_mode"]) == (1.0, "center")
    assert written["environment"]["packages"]["torch"] == torch.__version__.split("+")[0]
    assert written["allocated_mib"] is None
    assert written["rss_peak_mib"] > 0
    assert f"top-1 {written['top1']:.2f} %" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        {"amp": "bf16", "jit": True},
        {"dtype": "bf16", "impl": "plain"},
        {"channels_last": True, "batch_size": 3},
        {"fold": False, "norm": "batchnorm"},
    ],
)
def test_precision_layout_and_implementation_hardly_change_the_loss(config, plain, change):
    found = run(replace(config, **change))
    # bf16 keeps 8 bits: logits, and so the loss, are off by some 2**-8
    exact = "bf16" not in str(change)
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5 if exact else 2e-2)


@pytest.mark.parametrize("only_data_classes", [False, True])
def test_data_may_have_some_of_the_classes(config, data, only_data_classes, tmp_path, capsys):
    """All classes of the weights compete, unless the option leaves out those that data lack."""
    shutil.copytree(data, tmp_path / "some")
    shutil.rmtree(tmp_path / "some" / "val" / CLASSES[0])
    options = {"only_data_classes": only_data_classes, "per_class": tmp_path / "classes"}
    config = dataclasses.replace(config, data=str(tmp_path / "some"), **options)
    found, printed = run(config), capsys.readouterr().out
    line = "only these are predicted" if only_data_classes else "all 3 can be predicted"
    assert f"the data have 2 of the weights' 3 classes: {line}" in printed
    cfg = EvalTransform(input_size=12, crop_mode="center", crop_pct=1.0)
    dataset = open_split(tmp_path / "some", "val", eval_transform(cfg))
    names = ["red", *CLASSES[:2]]
    labels = torch.tensor([names.index(dataset.classes[label]) for label in dataset.targets])
    model = create(weights=config.weights).eval()
    with torch.no_grad():
        logits = torch.cat([model(image[None] / 255) for image, _ in dataset])
    if only_data_classes:
        logits[:, names.index(CLASSES[0])] = -torch.inf
    loss = functional.cross_entropy(logits, labels)
    assert (found["images"], found["loss"]) == (len(dataset), pytest.approx(loss.item(), rel=1e-5))
    correct = (logits.argmax(1) == labels).float().mean().item()
    assert found["top1"] == pytest.approx(100 * correct)
    assert f"{tmp_path / 'classes'}: per_class.csv, confusion.csv" in printed
    with (tmp_path / "classes" / "confusion.csv").open(newline="") as file:
        (_, *head), *rows = csv.reader(file)
    assert head == ["green", "red"] if only_data_classes else ["green", "red", "blue"]
    pairs = zip(labels.tolist(), logits.argmax(1).tolist(), strict=True)
    counts = Counter((names[label], names[best]) for label, best in pairs)
    expected = [[name, *(str(counts[name, other]) for other in head)] for name in head]
    assert rows == expected
    with pytest.raises(ConfigError, match=r"per_class.csv exists: .* add --overwrite"):
        run(config)
    with pytest.raises(ConfigError, match=f"there is no directory {tmp_path / 'a'}"):
        run(dataclasses.replace(config, per_class=tmp_path / "a" / "b", overwrite=True))


PEERS = ("resnet10t", "test_efficientnet", "test_vit2")  # of other means, crops and sizes


@pytest.fixture
def peers(monkeypatch):
    """Let timm build its models of three classes with random weights, as if from its cache."""
    made, create_model = {}, timm.create_model

    def offline(name, pretrained):
        assert pretrained
        if name == "resnet18":
            raise OSError("no network")
        torch.manual_seed(len(name))
        made[name] = create_model(name, num_classes=3)
        return made[name]

    monkeypatch.setattr(timm, "create_model", offline)
    return made


def accuracy_by_timm(model, folder):
    """Return top-1 in per cent and the loss, with the transform of timm's validate.py."""
    transform = create_transform(**resolve_data_config(model=model, use_test_size=True))
    images, targets = zip(*ImageFolder(folder, transform), strict=True)
    with torch.no_grad():
        logits = model.eval()(torch.stack(images))
    right = logits.argmax(1) == torch.tensor(targets)
    return 100 * right.float().mean().item(), functional.cross_entropy(
        logits, torch.tensor(targets)
    ).item()


def test_models_of_timm_are_evaluated_as_timms_own_loop_does(config, data, peers, tmp_path, capsys):
    """Each has its own size, crop and normalisation; ours has the row that it has alone."""
    names = (config.weights, *(f"timm:{name}" for name in PEERS), "timm:resnet18", "nowhere.pth")
    table, results = tmp_path / "table.csv", tmp_path / "results.json"
    options = f"--csv {table} --output {results} --workers 0 --batch-size 4 --device cpu"
    assert eval_main(f"--data {data} --weights {' '.join(names)} {options}") == 1
    printed = capsys.readouterr().out
    with table.open(newline="") as file:
        rows = {row["weights"]: row for row in csv.DictReader(file)}
    assert [*rows] == [*names]
    alone = run(config)
    assert float(rows[names[0]]["top1"]) == alone["top1"]
    assert float(rows[names[0]]["loss"]) == alone["loss"]
    for name in PEERS:
        row, model = rows[f"timm:{name}"], peers[name]
        top1, loss = accuracy_by_timm(model, data / "val")
        assert float(row["top1"]) == pytest.approx(top1)
        assert float(row["loss"]) == pytest.approx(loss, rel=1e-4)
        assert int(row["parameters"]) == sum(p.numel() for p in model.parameters())
        assert float(row["images_per_s"]) > 0
        assert float(row["rss_peak_mib"]) > 0
    assert len({row["input_size"] for row in rows.values()}) > 2
    assert "OSError: no network" in rows["timm:resnet18"]["error"]
    assert rows["nowhere.pth"]["error"].startswith("CheckpointError: ")
    assert [one.get("top1") for one in json.loads(results.read_text())[:2]] == [
        float(rows[name]["top1"]) for name in names[:2]
    ]
    lines = printed[printed.rindex("\nweights ") :].splitlines()[1:]
    assert lines[0].split() == [
        *("weights", "input_size", "top1", "images_per_s", "rss_peak_mib", "parameters", "error")
    ]
    assert [line.split()[0] for line in lines[1:]] == [*names]


def test_classes_of_a_model_of_timm_are_matched_as_those_of_a_file(config, peers, tmp_path):
    """Names come from --class-map; other classes than the model's are refused."""
    one = dataclasses.replace(config, weights="timm:resnet10t")
    (tmp_path / "names").write_text("red\nblue\ngreen\n")
    turned = run(dataclasses.replace(one, class_map=str(tmp_path / "names")))
    assert turned["loss"] != run(one)["loss"]
    (tmp_path / "two").write_text("red\nblue\n")
    with pytest.raises(TResNetError, match=r"expected (only )?the"):
        run(dataclasses.replace(one, class_map=str(tmp_path / "two")))
    write_images(tmp_path / "data", ("blue", "green"), val=4)
    with pytest.raises(ConfigError, match="the weights have 3 classes, the data 2"):
        run(dataclasses.replace(one, data=str(tmp_path / "data")))


def test_classes_of_imagenet_are_known(monkeypatch):
    create_model = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create_model(name))
    opened = open_pretrained("timm:resnet10t")
    assert opened.classes is not None
    assert opened.classes[:2] == ("n01440764", "n01443537")
