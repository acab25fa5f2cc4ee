"""Files that others have published: each loads whole, and gives the logits of its authors' code."""

import json
import random
import re
from argparse import Namespace

import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.checkpoints.public_files import DESCRIBED, empty, in_form, rebuild, values
from tests.engine.runs import eval_main, train_main
from tests.toys import same, small
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import open_checkpoint
from tresnet.checkpoints.fit import load_checkpoint
from tresnet.checkpoints.save import save_checkpoint
from tresnet.cli.main import main as run
from tresnet.errors import CheckpointError
from tresnet.models.zoo import build

TRANSFORMER, FRELU = "Q2L-TResL-448", "TResnet-D-FLq_ema_6-30000"
# One file of each head; all files are read, whole or cut down, by the slow tests.
QUICK = ("MS_COCO_TRresNet_M_224_81.8", "newabn_m_COCO", "tresnet_m_COCO_224_84_2")
WHOLE = [name for name in DESCRIBED if name != FRELU]
FILES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WHOLE]
LIMIT = 600  # characters of an error


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pth"


@pytest.mark.parametrize("name", FILES)
def test_the_outputs_are_those_of_the_authors_code(path, name, caplog):
    file = rebuild(name)
    torch.save(file.contents, path)
    options = {}
    if name == TRANSFORMER:
        with pytest.raises(
            CheckpointError, match=r"num_classes=0.*module\.transformer\.\*"
        ) as info:
            create(weights=path)
        assert len(str(info.value)) <= LIMIT
        options = {"num_classes": 0}
    model = create(weights=path, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        found = model.forward_features(file.images) if options else model(file.images)
    assert "transformer" in caplog.text or not options
    found = found.flatten(1)[:, : file.logits.shape[1]]
    assert float((found - file.logits).abs().max()) < 1e-6 * file.std
    classes = open_checkpoint(path).classes
    assert classes is None or classes == tuple(f"name {i}" for i in range(model.num_classes))
    assert (classes is None) == ("NAMES" not in DESCRIBED[name]["form"].values())


STATE = small().state_dict()
BODY = {name: tensor for name, tensor in STATE.items() if name.startswith("body.")}
INNER = {f"net.{name}": BODY[name] for name in BODY}
LAYER = {"weight": torch.ones(5, 512), "bias": torch.ones(5)}


def layers(*names):
    return {f"{name}.{part}": tensor for name in names for part, tensor in LAYER.items()}


@pytest.mark.parametrize(
    ("contents", "named"),
    [
        (BODY | layers(*(f"head.mlp.{i}" for i in range(9))), r"head\.mlp\.\* \(18 tensors\)"),
        ({"model": BODY, "classifier": {"w": torch.ones(2)}}, "classifier: w"),
        (BODY | layers("head.fc.1"), "head.fc.1.weight, head.fc.1.bias"),  # after dropout
        (BODY | layers("head.fc.0", "head.fc.2"), "head.fc.0.weight, head.fc.0.bias, head.fc.2.w"),
        (STATE | layers("head2.fc"), "head2.fc.weight, head2.fc.bias"),
        # words of training in the names
        ({"ema": {"net": BODY, "classifier": LAYER}, "net": STATE}, "ema: classifier: weight, ema"),
        ({"net": BODY, "head": layers("fc.embedding_generator.0")}, "head: fc.embedding_generator"),
        (INNER | layers("head.loss"), "head.loss.weight"),
        (
            {"a": INNER | layers("metric_fc", "random_projection")},
            "metric_fc.weight, metric_fc.bia",
        ),
        (INNER | layers("head.fc"), "head.fc.weight, head.fc.bias"),
        (
            BODY
            | layers("head.decoder.wordvec_proj", "head.decoder.embed_standart")
            | {"head.decoder.duplicate_pooling": torch.ones(768, 1)},
            r"head.decoder.wordvec_proj.* \(2 tensors\), head.fc.* \(2 t.*, head.fc.duplica",
        ),
    ],
)
def test_unknown_heads_are_named_until_only_the_body_is_wanted(path, contents, named, caplog):
    torch.save(contents, path)
    for options in ({}, {"num_classes": 5}, {"head": "ml_decoder"}):
        with pytest.raises(CheckpointError, match=rf"num_classes=0, or .* unknown: .*{named}"):
            create(weights=path, **options)
    with pytest.raises(CheckpointError, match=f"unknown: .*{named}"):
        load_checkpoint(small(), path)
    for options in ({"num_classes": 0}, {"num_classes": 7, "new_head": True}):
        caplog.clear()
        create(weights=path, **options)
        assert re.search(f"left out: .*{named}", caplog.text)


ARGS = {"gp": "max", "img_size": 448, "crop_pct": 0.9, "mean": None, "interpolation": ""}


def test_settings_of_timms_trainer_are_read(path, caplog):
    """They stand beside the weights, and change outputs."""
    kwargs = {"stem_slope": 0.25, "norm": "batchnorm", "impl": "plain"}
    torch.save({"state_dict": STATE, "args": Namespace(**ARGS, model_kwargs=kwargs)}, path)
    found = open_checkpoint(path)
    assert (found.config.global_pool, found.config.stem_slope) == ("max", 0.25)
    assert found.slopes_source == "as the file states"
    assert create(weights=path).body.conv1.bn.slope == 0.25
    cfg = found.pretrained_cfg
    assert (cfg["input_size"], cfg["crop_pct"]) == ((3, 448, 448), 0.9)
    assert (cfg["mean"], cfg["interpolation"]) == ((0.0,) * 3, "bilinear")
    odd = {"input_size": [1, 64, 64], "interpolation": "random", "results": {}}
    odd["model_kwargs"] = {"bn_momentum": 0.1, "block_slope": 0.5}
    torch.save({"state_dict": STATE, "args": ARGS | odd}, path)
    assert open_checkpoint(path).config.block_slope == 0.5
    assert "not used: bn_momentum, input_size, interpolation" in caplog.text
    load_checkpoint(small(), path)
    for args, message in (
        ({"gp": "catavgmax"}, "settings of a trainer in .*global_pool: expected"),
    ):
        torch.save({"state_dict": STATE, "args": ARGS | args}, path)
        with pytest.raises(CheckpointError, match=message):
            create(weights=path)


IMAGENETS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@pytest.mark.parametrize("around", ["", "args", "header", "MEANS"])
def test_weights_for_normalised_images_need_a_new_head(path, around, caplog, capsys):
    if around == "header":
        header = {key: json.dumps(numbers) for key, numbers in IMAGENETS.items()}
        safetensors.torch.save_file(STATE, path, header)
    else:
        found = {f"PIXEL_{key.upper()}": numbers for key, numbers in IMAGENETS.items()}
        found = found if around == "MEANS" else IMAGENETS
        torch.save({"model": STATE, **({around: found} if around else found)}, path)
    with pytest.raises(CheckpointError, match=r"mean 0 and std 1, got .*mean \(0.485, 0.456, 0.4"):
        create(weights=path)
    load_checkpoint(small(), path)
    for options in ({"num_classes": 0}, {"num_classes": 7, "new_head": True}):
        caplog.clear()
        create(weights=path, **options)
        assert "images normalised by mean (0.485, 0.456, 0.406) and std (0.229, 0" in caplog.text
    assert run(["info", str(path)]) == 0
    assert ", normalised by mean (0.485, 0.456, 0.406) and std (0.229, 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "beside",
    [
        {"results": {"acc_mean": [0.8, 0.7, 0.9], "acc_std": [0.1, 0.1, 0.1]}},
        {
            "labels": "multi",
            "optimizer": {"param_groups": [{"names": list("abcde")}, {"names": "a"}]},
        },
        {"mean": [[[0.485]], [[0.456]], [[0.406]]], "std": [[[1]], [[1]], [[1]]]},
    ],
)
def test_what_is_no_setting_is_not_taken_for_one(path, beside, caplog):
    """Neither is a dict of weights that is named as our metadata."""
    for weights in ({"state_dict": {"tresnet": STATE}}, {"tresnet": STATE}):
        torch.save(weights | beside, path)
        found = open_checkpoint(path)
        assert (found.pixels, found.classes) == ("in [0, 1], without mean and deviation", None)
        assert "not read" not in caplog.text


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "tresnet_m_open_images_200_groups_86_8",
            [
                "classes     name 0, name 1",
                "format      public: the TResNet authors' names and an ML-Decoder by its authors",
                "model       tresnet_m\n",
                "head        ml_decoder, 200 groups, 9605 classes, any number of labels per image",
                "slopes      0.01 in the stem, 0.001 in the blocks, as in the code that has such",
                "images      224x224 (the default: not stated), in [0, 1], without mean and dev",
            ],
        ),
        (
            "stanford_cars_tresnet-l-v2_96_27",
            [
                "model       tresnet_v2_l\n",
                "head        linear, 196 classes, one label per image",
                "slopes      1e-06 in the stem, 1e-06 in the blocks, as of TResNet's file of 196",
            ],
        ),
        (
            TRANSFORMER,
            [
                "head        not of this package, so only the body can be loaded (num_classes=0)",
                "unknown     module.backbone.1.pe, module.transformer.* (",
            ],
        ),
    ],
)
def test_info_says_what_a_file_is(path, name, lines, capsys):
    torch.save(in_form(name, empty(name)), path)
    assert run(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert all(line in text for line in lines)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"idx_to_class": {0: "a"}}, "idx_to_class"),
        ({"idx_to_class": {i + 1: "a" for i in range(5)}}, "idx_to_class"),
        ({"idx_to_class": "abcde"}, "idx_to_class"),
        ({"class_to_idx": dict.fromkeys("abcde", 0)}, "class_to_idx"),
        ({"hparams": {"classes": list("abcd")}}, "hparams: classes"),
        ({"args": {"id2label": {"x": "a"}}}, "args: id2label"),
        ({"names": [*range(5)]}, "names"),
    ],
)
def test_names_that_do_not_fit_are_reported(path, values, key, caplog):
    torch.save({"model": small().state_dict(), **values}, path)
    assert open_checkpoint(path).classes is None
    said = f"its {key} is not read: expected the names of 5 classes, alone or by 0, 1, ..."
    assert f"{path}: {said}" in caplog.text


BY_INDEX = {"idx_to_class": dict(enumerate("abcde"))}


@pytest.mark.parametrize(
    ("contents", "labels"),
    [
        ({"model": STATE, **BY_INDEX}, "multi"),
        ({"model": STATE, "idx_to_class": list("abcde")}, "multi"),
        ({"model": STATE, "class_to_idx": {c: i for i, c in enumerate("abcde")}}, "single"),
        ({"a": {"b": {f"module.{key}": STATE[key] for key in STATE}}, **BY_INDEX}, "multi"),
        ({"a": {"b": STATE, **BY_INDEX}, "c": {"idx_to_class": {0: "of another"}}}, "multi"),
        ({"model": STATE, "hparams": {"class_names": list("abcde"), "classes": 5}}, "single"),
        ({"model": STATE, "args": Namespace(id2label=dict(enumerate("abcde")))}, "single"),
        ({"model": STATE, "c": {"names": list("vwxyz")}, "classes": tuple("abcde")}, "single"),
        ({"header": {"idx_to_class": json.dumps(dict(enumerate("abcde")))}}, "multi"),
        ({"header": {"class_names": '["a", "b", "c", "d", "e"]', "format": "pt"}}, "single"),
        ({"state_dict": STATE, "meta": {"dataset": {"CLASSES": tuple("abcde")}}}, "single"),
        ({"model": STATE | layers("proj.head"), "labels": list("abcde")}, "single"),
        ({"model": STATE, "x": {"classes": [1, 2]}, "names": list("abcde")}, "single"),
        ({"model": STATE, "label2id": {c: i for i, c in enumerate("abcde")}}, "single"),
    ],
)
def test_names_of_classes_are_read_around_the_weights(path, contents, labels, caplog):
    if "header" in contents:
        safetensors.torch.save_file(STATE, path, contents["header"])
    else:
        torch.save(contents, path)
    found = open_checkpoint(path)
    assert (found.classes, found.labels) == (tuple("abcde"), labels)
    assert found.labels_source == "a guess"
    assert "not read" not in caplog.text


@pytest.mark.parametrize(
    ("metadata", "config", "expected"),
    [
        ({"labels": "multi"}, {}, ("multi", "as the file states")),
        ({"top1": 5.0}, {}, ("single", "as the file states")),
        (None, {"problem_type": "multi_label_classification"}, ("multi", "as the file states")),
        (None, {"problem_type": "single_label_classification"}, ("single", "as the file states")),
        (None, {}, ("single", "a guess")),
    ],
)
def test_the_kind_of_labels_is_stated_or_a_guess(tmp_path, metadata, config, expected, capsys):
    format = "timm" if metadata is None else "tresnet"
    file, ours = tmp_path / "model.safetensors", tmp_path / "ours.safetensors"
    save_checkpoint(small(), file, format=format, metadata=metadata)
    (tmp_path / "config.json").write_text(json.dumps({**config, "threshold": 0.25}))
    found = open_checkpoint(tmp_path)
    assert (found.labels, found.labels_source) == expected
    assert found.user.get("threshold") == (0.25 if config else None)
    assert run(["info", str(tmp_path)]) == 0
    assert f" per image, {expected[1]}\n" in capsys.readouterr().out
    other = "single" if expected[0] == "multi" else "multi"
    assert run(["convert", str(tmp_path), str(ours), "--labels", other]) == 0
    found = open_checkpoint(ours)
    assert (found.labels, found.labels_source) == (other, "as the file states")


def test_frelu_is_refused_in_three_lines(path):
    torch.save(rebuild(FRELU).contents, path)
    with pytest.raises(CheckpointError, match="holds activations FReLU") as info:
        create(weights=path)
    assert len(str(info.value)) < 300


def cut_down(name):
    """The tensors of a published file with only the first block of each stage, all zero."""
    every = empty(name)
    return {key: every[key] for key in every if not re.search(r"layer\d\.[1-9]", key)}


ODD = [lambda key: f"{key}x", lambda key: f"x{key}", lambda key: ".x".join(key.rsplit(".", 1))]


@pytest.mark.parametrize("name", WHOLE)
def test_a_renamed_tensor_is_named_in_an_error(path, name):
    """No tensor of any format is dropped because its name is unknown."""
    tensors, chance = cut_down(name), random.Random(name)
    torch.save(tensors, path)
    config = open_checkpoint(path).config
    model = build(config.variant, **config.options, device="meta")
    options = {"num_classes": 0} if name == TRANSFORMER else {}
    inside = [key for key in tensors if "body." in key or not options]
    for key in chance.sample(sorted(inside), 8):
        odd = chance.choice(ODD)(key)
        torch.save({odd if key == old else old: v for old, v in tensors.items()}, path)
        for load in (lambda: create(weights=path, **options), lambda: load_checkpoint(model, path)):
            with pytest.raises(CheckpointError) as info:
                load()
            assert len(str(info.value)) <= LIMIT
            named = odd, f"{odd.rpartition('body.')[0]}*"  # the second of a body of one tensor
            assert any(name in str(info.value) for name in named), key


@pytest.mark.parametrize("name", [one for one, name in zip(FILES, WHOLE, strict=True)
                                  if name != TRANSFORMER])  # fmt: skip
def test_files_go_through_convert_and_push_and_back(path, name, tmp_path):
    """A block in each stage is enough; heads and names of classes are those of the whole file."""
    tensors = {key: values(key, [*v.shape], "") for key, v in cut_down(name).items()}
    without = ("filt", "num_batches_tracked")
    tensors = {key: t.abs() + 0.5 for key, t in tensors.items() if not key.endswith(without)}
    classes = {i: f"name {i}" for i in range(DESCRIBED[name]["outputs"])}
    torch.save({"model": tensors, "idx_to_class": classes}, path)
    ours, pushed = tmp_path / "ours.safetensors", tmp_path / "pushed"
    assert run(["convert", str(path), str(ours)]) == 0
    assert run(["push", str(path), str(pushed), "--license", "mit"]) == 0
    first = open_checkpoint(path)
    expected = {name: tensor.float() for name, tensor in first.tensors.items()}
    for again in (open_checkpoint(ours), open_checkpoint(pushed)):
        assert (again.config, again.classes) == (first.config, first.classes)
        assert (again.labels, again.labels_source) == (first.labels, "as the file states")
        counts = again.tensors.keys() - expected.keys()
        assert all(name.endswith("num_batches_tracked") for name in counts)
        assert same({name: again.tensors[name] for name in expected}, expected)
    theirs = tmp_path / "timm.safetensors"
    code = run(["convert", str(path), str(theirs), "--format", "timm"])
    as_timms = first.config.head in ("linear", "ml_decoder") and first.config.block_slope == 1e-3
    assert code == (0 if as_timms else 2)
    assert theirs.exists() == (code == 0)
    assert not as_timms or open_checkpoint(theirs).config == first.config


def test_a_file_of_many_labels_is_trained_on_evaluated_and_predicted(path, tmp_path, capsys):
    """mAP is scikit-learn's, for ML-Decoder's file with a block in each stage."""
    metrics = pytest.importorskip("sklearn.metrics")
    name, generator = "tresnet_m_COCO_224_84_2", torch.Generator().manual_seed(0)
    kinds = {1: "var", 2: "matrix", 3: "matrix", 4: "matrix"}
    tensors = cut_down(name)
    tensors = {key: values(key, [*v.shape], kinds[v.dim()]) for key, v in tensors.items()}
    torch.save({"model": tensors, "idx_to_class": {i: f"name {i}" for i in range(80)}}, path)
    pixels = torch.randint(256, (6, 64, 64, 3), generator=generator, dtype=torch.uint8)
    targets = torch.rand(6, 80, generator=generator) < 0.3
    lines = [",".join(["image", *(f"name {i}" for i in range(80))])]
    for number, (image, row) in enumerate(zip(pixels, targets.tolist(), strict=True)):
        Image.fromarray(image.numpy()).save(tmp_path / f"{number}.png")
        lines.append(",".join([f"{number}.png", *(str(int(has)) for has in row)]))
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").write_text("\n".join(lines) + "\n")
    common = f"--data {tmp_path} --weights {path} --input-size 64 --workers 0 --device cpu"
    output = tmp_path / "result.json"
    assert eval_main(f"{common} --crop-pct 1 --output {output}") == 0
    with torch.no_grad():
        scores = create(weights=path).eval()(pixels.permute(0, 3, 1, 2))
    given = targets.any(0)
    expected = metrics.average_precision_score(targets[:, given], scores[:, given])
    assert json.loads(output.read_text())["map"] == pytest.approx(100 * expected, abs=0.01)
    assert run(["predict", str(tmp_path / "0.png"), "--weights", str(path), "--top-k", "2"]) == 0
    assert capsys.readouterr().out.count("name") >= 2
    (tmp_path / "train.csv").write_text("image,a,b\n0.png,1,0\n1.png,0,1\n2.png,1,1\n3.png,0,0\n")
    (tmp_path / "val.csv").write_text("image,a,b\n4.png,1,0\n5.png,0,1\n")
    options = "--recipe multilabel --epochs 1 --batch-size 2 --no-progress --name run"
    assert train_main(f"{options} {common} --runs {tmp_path / 'runs'}") == 0
    config = open_checkpoint(tmp_path / "runs" / "run" / "best.safetensors").config
    assert (config.head, config.num_classes) == ("ml_decoder", 2)
