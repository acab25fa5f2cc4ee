"""Write weights in timm's layout for the Hugging Face hub: tensors, config.json, model card."""

import json
import tempfile
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from tresnet import environment
from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import SLOPES, Checkpoint
from tresnet.checkpoints.locate import HUB, HUB_FILENAME
from tresnet.checkpoints.save import computed_by_timm, save_checkpoint
from tresnet.errors import CheckpointError, InputError, listed
from tresnet.models.tresnet import TResNet
from tresnet.models.zoo import make_config
from tresnet.writing import atomic_directory

_DESCRIPTION = """\
{model} ([TResNet](https://arxiv.org/abs/2003.13630)), {parameters:,} parameters, {classes} classes.
Images of {input_size[1]} x {input_size[2]} pixels{values}:
{interpolation} resize, crop mode {crop_mode}, {crop_pct:g} of the side kept.

## Accuracy

{accuracy}

## Training

{training}
"""
_KINDS = {"top1": "top-1", "top5": "top-5", "map": "mAP", "f1": "F1"}


def push(
    checkpoint: Checkpoint, target: str, license: str | None = None, private: bool = False
) -> str:
    """Write weights in timm's layout to a new directory or the hub; return the path or URL.

    `target` is a new directory or `hf-hub:USER/NAME`; a missing repository is created. `license` is
    an SPDX identifier or 'other'. With None, published weights keep their licence. For weights that
    are not published, None is an error.

    Raises:
        InputError: the directory exists, or the licence is missing or unknown.
        CheckpointError: the weights are not finite, or the upload fails.
        WriteError: the directory cannot be written; an incomplete directory is removed.
    """
    license = license or (checkpoint.entry.license if checkpoint.entry else None)
    if license is None:
        raise InputError("expected a licence for weights of your own: give --license, such as mit")
    if license != "other":  # the hub's name for a licence without an identifier
        try:
            license = canonicalize_license_expression(license).lower()  # as the hub spells it
        except InvalidLicenseExpression:
            raise InputError(
                f"expected an SPDX identifier such as apache-2.0, got {license!r}: use 'other' for "
                "a licence without an identifier"
            ) from None
    checkpoint.check_finite()
    if target.startswith(HUB):
        with tempfile.TemporaryDirectory() as folder:
            _write(checkpoint, Path(folder), target.removeprefix(HUB), license)
            return _upload(Path(folder), target.removeprefix(HUB), private)
    place = Path(target)
    if place.exists():
        raise InputError(f"expected a new directory, but {place} exists: choose another name")
    with atomic_directory(place) as folder:
        _write(checkpoint, folder, place.name, license)
    return target


def _upload(folder: Path, repo_id: str, private: bool) -> str:
    from huggingface_hub import HfApi

    api = HfApi(library_name="tresnet", library_version=environment.__version__)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        message = "Add weights, configuration and model card"
        return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message))
    except Exception as error:  # huggingface_hub wraps errors of an upload in RuntimeError
        cause = error.__cause__ if type(error) is RuntimeError else error
        raise CheckpointError(
            f"could not push to hf-hub:{repo_id} ({type(cause).__name__}: {cause}): check the name "
            "and the network; writing needs a token, in the variable HF_TOKEN"
        ) from error


def _write(checkpoint: Checkpoint, folder: Path, name: str, license: str) -> None:
    from timm.models._hub import generate_readme, save_config_for_hf

    model = create(weights=checkpoint, device="cpu")
    assert isinstance(model, TResNet), "features_only is False"
    model.pretrained_cfg = {**model.pretrained_cfg, "license": license}
    # timm also reads our format, because it ignores the metadata in the file's header.
    save_checkpoint(model, folder / HUB_FILENAME, metadata=checkpoint.user)
    names, words = checkpoint.classes, checkpoint.descriptions
    labels: dict[str, Any] = {"label_names": names}
    if names is not None and words is not None:
        labels["label_descriptions"] = dict(zip(names, words, strict=True))
    usual = make_config(checkpoint.config.variant).options
    usual |= {name: getattr(checkpoint.config, name) for name in SLOPES}  # unknown to timm
    options = checkpoint.config.options.items()
    args = {key: value for key, value in options if value != usual[key]}
    path = folder / "config.json"
    save_config_for_hf(model, str(path), labels, args)
    config = json.loads(path.read_text(encoding="utf-8"))
    # remove num_classes, which timm 1.0.31 repeats here: transformers would pass it twice and fail
    config.get("model_args", {}).pop("num_classes", None)
    if checkpoint.labels == "multi":  # else pipelines of transformers use a softmax
        config["problem_type"] = "multi_label_classification"
        config["threshold"] = checkpoint.user.get("threshold")  # for all labels, or in their order
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    accuracy, training = _history(checkpoint)
    cfg, values = checkpoint.pretrained_cfg, f" {checkpoint.pixels}"
    if "pixel_dtype" in cfg:
        mean, std = (listed((f"{value:g}" for value in cfg[key]), 16) for key in ("mean", "std"))
        values = f", {checkpoint.pixels} (mean {mean}; deviation {std})"
    description = _DESCRIPTION.format(
        **cfg,
        values=values,
        model=checkpoint.config.variant,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        classes=checkpoint.num_classes,
        accuracy=accuracy,
        training=training,
    )
    plugin = "" if computed_by_timm(model) else "import tresnet.timm_plugin  # from tresnet\n"
    place = f"hf-hub:{name}" if "/" in name else f"local-dir:{name}"
    use = f'import timm\n{plugin}\nmodel = timm.create_model("{place}", pretrained=True).eval()'
    tags = ["image-classification", "timm", "tresnet"]
    card = {"license": license, "tags": tags, "description": description}
    text = generate_readme({**card, "usage": f"```python\n{use}\n```"}, name)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _history(checkpoint: Checkpoint) -> tuple[str, str]:
    scores, entry = checkpoint.user, checkpoint.entry
    on, how = scores.get("data") or "unknown data", "the run that trained them, by this package"
    training = [f"On {on}, recipe {scores['recipe']}."] if "recipe" in scores else []
    if entry is not None:
        scores = {"top1": entry.top1, "top5": entry.top5}
        on, how = entry.trained_on, entry.accuracy_source
        training = [f"On {on}."]
        training += [f"`{entry.command}`"] if entry.command else []
    training += _run(checkpoint.path.parent)
    measured = {_KINDS[k]: scores[k] for k in _KINDS if isinstance(scores.get(k), int | float)}
    figures = ", ".join(f"{kind} {value:.2f} %" for kind, value in measured.items())
    data = on if entry else f"val of {on}"
    accuracy = f"{figures} on {data}, measured by {how}." if figures else "Not known."
    return accuracy, "\n\n".join(training) or "Not known."


def _run(folder: Path) -> list[str]:
    """Return paragraphs on the training run that wrote `folder`, or [] if no run wrote it."""

    def without_folders(values: dict[str, Any]) -> dict[str, Any]:  # whose names may be private
        texts = {k: v for k, v in values.items() if isinstance(v, str) and not v.startswith(HUB)}
        return values | {key: Path(text).name for key, text in texts.items()}

    files = [folder / name for name in ("log.jsonl", "environment.json", "config.json")]
    if not all(map(Path.is_file, files)):
        return []
    try:
        log, environment, config = (file.read_text(encoding="utf-8") for file in files)
        last, where = json.loads(log.splitlines()[-1]), json.loads(environment)[-1]
        device = where["device"].get("name") or where["device"]["type"]
        commit = (where["git"] or {}).get("commit", "an unknown commit")
        settings = json.loads(config, object_hook=without_folders)
        return [
            f"{last['epoch']} epochs, {last['step']} optimizer steps, {last['elapsed_s']:.0f} s, on"
            f" {device} with PyTorch {where['packages']['torch']}; this package at {commit}.",
            f"```json\n{json.dumps(settings, indent=2)}\n```",
        ]
    except Exception as error:  # damaged JSON raises errors of many types
        raise CheckpointError(
            f"expected the files of a run in {folder} ({type(error).__name__}: {error}): move the "
            "weights elsewhere to push them without a description of the run"
        ) from error
