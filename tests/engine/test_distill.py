import json
import shutil

import pytest
import timm
import torch
from torch import nn

from tests.engine.runs import CLASSES, CPU, resolved, rows_of
from tests.toys import smallest
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.push import push
from tresnet.checkpoints.save import save_checkpoint
from tresnet.engine import config as configs
from tresnet.engine import state
from tresnet.engine.distill import create_teacher
from tresnet.engine.losses import Losses, SemanticSoftmaxLoss, read_hierarchy
from tresnet.engine.splits import fingerprint_option_files
from tresnet.engine.train import train
from tresnet.errors import CheckpointError, ConfigError, TrainingError


def images(n=4):
    return torch.rand(n, 3, 12, 12, generator=torch.Generator().manual_seed(3))


def test_a_teacher_of_our_own_answers_as_it_does_alone(tiny, finished):
    """The teacher is folded, and its classes are matched by name."""
    path = str(finished / "best.safetensors")
    alone = create(weights=path).eval()
    turned = ("red", "blue", "green")
    with torch.no_grad():
        expected = alone(images())[:, [2, 0, 1]]
    teacher = create_teacher(resolved(tiny(teacher=path)), turned, CPU)
    torch.testing.assert_close(teacher(images()), expected, rtol=1e-4, atol=1e-5)


def test_a_teacher_of_timms_gets_images_as_it_knows_them(tiny, tmp_path, monkeypatch):
    made, create_model = [], timm.create_model

    def offline(name, pretrained):
        assert pretrained
        made.append(create_model(name, num_classes=3))
        return made[0]

    monkeypatch.setattr(timm, "create_model", offline)
    teacher = create_teacher(resolved(tiny(teacher="timm:resnet10t")), CLASSES, CPU)
    model = made[0].eval()
    mean, std = (
        torch.tensor(model.pretrained_cfg[name])[:, None, None] for name in ("mean", "std")
    )
    with torch.no_grad():
        expected = model((images() - mean) / std)
    torch.testing.assert_close(teacher(images()), expected)
    with pytest.raises(ConfigError, match="the weights have 3 classes, the data 2"):
        create_teacher(resolved(tiny(teacher="timm:resnet10t")), CLASSES[:2], CPU)
    (tmp_path / "map.txt").write_text("\n".join(CLASSES[:2]))
    config = resolved(tiny(teacher="timm:resnet10t", class_map=str(tmp_path / "map.txt")))
    with pytest.raises(CheckpointError, match="names of the 3 classes of timm:resnet10t, got 2"):
        create_teacher(config, CLASSES[:2], CPU)


@pytest.mark.parametrize("skip_bad_steps", [0, 2])
def test_a_teacher_whose_outputs_are_not_finite_is_named(tiny, finished, tmp_path, skip_bad_steps):
    model = create(weights=finished / "best.safetensors")
    model.get_parameter("head.fc.weight").data.fill_(3e38)
    model.get_parameter("head.fc.bias").data.zero_()
    path = tmp_path / "large.safetensors"
    save_checkpoint(model, path, metadata={"classes": CLASSES})
    message = f"^the outputs of --teacher {path} are not finite, so .*: there is no checkpoint yet"
    with pytest.raises(TrainingError, match=message):
        train(tiny(teacher=str(path), skip_bad_steps=skip_bad_steps))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_teachers_part_of_the_loss(tiny, temperature):
    """Compare with the definition of the divergence, for smoothed labels without mixing."""
    config = tiny(mixup=0.0, label_smoothing=0.3, kd_weight=5.0, kd_temperature=temperature)
    answers, logits = torch.randn(4, 3), torch.randn(4, 3)
    losses = Losses(config, CLASSES, 0, lambda images: answers)
    labels = torch.tensor([0, 1, 2, 1])
    _, targets, criterion = losses.prepare(images(), labels, 0, 0)
    p, q = (answers / temperature).softmax(1), (logits / temperature).softmax(1)
    divergence = (p * (p / q).log()).sum(1).mean()
    own = nn.functional.cross_entropy(logits, labels, label_smoothing=0.3)
    expected = own + 5 * temperature**2 * divergence
    torch.testing.assert_close(criterion(logits, targets), expected)


FILES = {
    "hierarchy": ('{"blue": "red"}', '{"green": "red"}'),
    "class_weights": ('{"blue": 1, "green": 1, "red": 9}', '{"blue": 1, "green": 1, "red": 1}'),
}


@pytest.mark.parametrize("option", ["teacher", *FILES])
def test_a_run_is_not_resumed_with_other_contents_of_an_options_file(
    tiny, tmp_path, finished, option
):
    path = tmp_path / "file.safetensors"
    options = {option: str(path), "mixup": 0.0, "epochs": 1}
    if option == "hierarchy":
        options["loss"] = "semantic-softmax"
    if option == "teacher":
        path.write_bytes((finished / "best.safetensors").read_bytes())
    else:
        path.write_text(FILES[option][0])
    run_dir = train(tiny(**options)).run_dir
    plain = train(tiny(mixup=0.0, epochs=1, name="plain")).run_dir
    assert rows_of(run_dir)[0]["loss"] != rows_of(plain)[0]["loss"]
    saved, other = (state.read(folder / "last.pt") for folder in (run_dir, finished))
    assert configs.flatten(saved.config)[option] == str(path)
    assert saved.state["model"].keys() == other.state["model"].keys()
    assert rows_of(run_dir)[0]["loss"] != rows_of(finished)[0]["loss"]
    train(tiny(**options), resume=run_dir)
    if option == "teacher":
        save_checkpoint(create(weights=path), path)
    else:
        path.write_text(FILES[option][1])
    with pytest.raises(ConfigError, match="--class-weights or --teacher changed"):
        train(tiny(**options), resume=run_dir)


@pytest.mark.parametrize("prefix", ["", "local-dir:"])
def test_a_teacher_in_a_directory_is_distinguished_from_another(tiny, tmp_path, prefix):
    config = tiny(teacher=f"{prefix}{tmp_path / 'teacher'}")
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_checkpoint(smallest(), tmp_path / "file.safetensors")
        shutil.rmtree(tmp_path / "teacher", ignore_errors=True)
        push(open_checkpoint(tmp_path / "file.safetensors"), str(tmp_path / "teacher"), "mit")
        found.append(fingerprint_option_files(config))
        (tmp_path / "teacher/README.md").write_text("another card")
        found.append(fingerprint_option_files(config))
    assert found[0] == found[1] != found[2]


# bléu and sky are roots; navy and cyan are bléu, téal is cyan; x is no class, but has a parent.
# A name may have Unicode's decomposed form.
HIERARCHY = {"navy": "bl\u00e9u", "cyan": "x", "x": "ble\u0301u", "te\u0301al": "cyan", "a": "navy"}
NAMES = ("bl\u00e9u", "cyan", "navy", "sky", "t\u00e9al")


def test_each_level_has_a_softmax_of_its_own(tmp_path):
    path = tmp_path / "hierarchy.json"
    path.write_text(json.dumps(HIERARCHY))
    ancestors = read_hierarchy(str(path), NAMES)
    assert ancestors == [[0], [1, 0], [2, 0], [3], [4, 1, 0]]
    logits, labels = torch.randn(3, 5).double(), torch.tensor([4, 2, 3])
    one = logits[:, [0, 3]].softmax(1).log()  # level 0: bléu, sky
    two = logits[:, [1, 2]].softmax(1).log()  # level 1: cyan, navy; téal is alone on level 2
    smooth = torch.tensor([0.9, 0.1])
    first = -(one[0] * smooth + one[1] * smooth + one[2] * smooth.flip(0)).sum()
    second = -(two[0] * smooth + two[1] * smooth.flip(0)).sum()
    expected = (first + 5 / 3 * second) / 3  # 3 of 5 classes are on level 1 or below
    loss = SemanticSoftmaxLoss(ancestors, smoothing=0.2)
    torch.testing.assert_close(loss(logits, labels), expected)
    # of 62 classes, a level of two would weigh 31
    rare = SemanticSoftmaxLoss([*([n] for n in range(60)), [60, 0], [61, 0]], smoothing=0.0)
    found = rare(torch.zeros(1, 62), torch.tensor([60]))
    torch.testing.assert_close(found, torch.tensor(60.0).log() + 20 * torch.tensor(2.0).log())
