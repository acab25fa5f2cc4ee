"""Read what a file says beside its tensors: our metadata, timm's config.json, names of classes."""

import contextlib
import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tresnet.checkpoints.locate import Source
from tresnet.checkpoints.read import METADATA_KEY, UNKNOWN, Contents, plain
from tresnet.errors import CheckpointError, InputError, check_known, listed
from tresnet.models.zoo import find_variant
from tresnet.settings import CROP, EvalTransform
from tresnet.settings.fields import check
from tresnet.settings.model import OPTIONS, ModelConfig

_log = logging.getLogger(__name__)
FORMAT_VERSION = 2
_IMAGE_KEYS = ("input_size", *CROP, "mean", "std", "pixel_dtype")
# Keys of names of classes. ASL's and ML-Decoder's idx_to_class has a name by each index, and
# class_to_idx of torchvision's data sets has an index by each name.
_BY_INDEX = "idx_to_class"
_NAMES = re.compile(
    rf"((?!.*param_groups: ).*: )?({_BY_INDEX}|class_to_idx|id2label|label2id|"
    "(class|label)_?(names|list)|classes|categories|labels|names)",
    re.DOTALL | re.IGNORECASE,
)
_MEAN = re.compile(r"((image|img|pixel|norm|data|input|rgb)[a-z]*_)?mean", re.IGNORECASE)


def read_metadata(path: Path, contents: Contents) -> tuple[dict[str, Any], ModelConfig] | None:
    """Return what `save_checkpoint` stored around the weights, and the configuration in it, if any.

    CheckpointError: it is of a later version or damaged.
    """
    prefix, values = contents.prefix, contents.values
    around = filter(prefix.startswith, values)
    places = [f"{name}{UNKNOWN}{METADATA_KEY}" if name else METADATA_KEY for name in around]
    places = [place for place in places if not prefix.startswith(place + UNKNOWN)]
    found = [values[place] for place in places if place in values]
    if not found:
        return None
    version = found[-1].get("format_version") if isinstance(found[-1], dict) else None
    try:
        if version not in (1, FORMAT_VERSION):
            raise InputError(f"of format {version!r}, while it reads up to {FORMAT_VERSION}")
        metadata = plain(found[-1])  # a torch file may hold any objects
        return metadata, check_metadata(metadata)
    except ValueError as error:
        raise CheckpointError(
            f"{path} has metadata that this version of tresnet cannot use ({error}): "
            "upgrade tresnet, or save the file again"
        ) from error


def check_metadata(metadata: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration in the metadata; raise InputError if any metadata are invalid."""
    config = ModelConfig.from_dict(_dict_at(metadata, "config"))
    find_variant(config.variant)
    _check_images(_dict_at(metadata, "pretrained_cfg"), config)
    _check_user(_dict_at(metadata, "user"), config)
    return config


def read_stated(
    source: Source, contents: Contents, config: ModelConfig
) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the model's configuration, and metadata on images and classes, without our metadata.

    They come from timm's config.json, or from a trainer's settings beside the weights. `config` is
    the configuration that fits the tensors; `model_args` override its fields. CheckpointError:
    config.json is damaged, or a value is unknown or invalid.
    """
    try:
        content = _of_trainer(source.path, contents.values, config)
        if source.config_json is not None:
            content = json.loads(source.config_json.read_text(encoding="utf-8"))
        cfg, names = _dict_at(content, "pretrained_cfg") or content, content.get("label_names")
        if isinstance(names, dict):  # a dict from each class index to the name
            names = [names[str(number)] for number in range(len(names))]
        descriptions = _dict_at(content, "label_descriptions")  # the keys are class names
        user = {} if names is None else {"classes": names}
        if names and descriptions:
            user["descriptions"] = [descriptions.get(name, name) for name in names]
        if kind := content.get("problem_type"):  # as transformers' pipelines read it
            user["labels"] = "multi" if kind == "multi_label_classification" else "single"
            user["threshold"] = content.get("threshold")
        args = _dict_at(content, "model_args")
        args = {key: value for key, value in args.items() if value is not None}
        for name in args:
            check_known("argument of a model", name, OPTIONS)
        config = ModelConfig.from_dict({**config.to_dict(), **args})
        metadata = {
            "pretrained_cfg": {key: cfg[key] for key in _IMAGE_KEYS if key in cfg},
            "user": user,
            "tag": f"{content.get('architecture')}.{cfg.get('tag')}",
        }
        _check_images(metadata["pretrained_cfg"], config)
        _check_user(metadata["user"], config)
    except Exception as error:  # damaged JSON raises errors of many types
        what = f"timm's config.json in {source.config_json}"
        what = f"settings of a trainer in {source.path}" if not source.config_json else what
        raise CheckpointError(f"expected {what} ({type(error).__name__}): {error}") from error
    return config, metadata


def _of_trainer(path: Path, values: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return what a trainer's settings beside the weights say, as timm's config.json would.

    They are the normalisation of any trainer, and image size, crop, pool and `model_kwargs` of
    timm's train.py. The log names those that this package has not.
    """
    cfg, args, unused = {}, {}, {}
    channels = config.in_chans
    for settings in filter(lambda value: isinstance(value, dict), values.values()):
        for key in filter(_MEAN.fullmatch, map(str, settings)):
            pair = settings.get(key), settings.get(key[:-4] + ("STD" if key.isupper() else "std"))
            lists = all(isinstance(v, list | tuple) and len(v) == channels for v in pair)
            if lists and all(isinstance(n, int | float) for v in pair for n in v):
                cfg |= {"mean": [*map(float, pair[0])], "std": [*map(float, pair[1])]}
        if {"gp", "img_size", "crop_pct"} <= settings.keys():
            side, said = settings["img_size"], {key: settings.get(key) for key in CROP}
            said["input_size"] = settings.get("input_size") or (side and [channels, side, side])
            for key, value in said.items():
                try:
                    _check_images({key: value} if value else {}, config)
                    cfg[key] = value
                except InputError:
                    unused[key] = value
            args = {"global_pool": settings["gp"], **(settings.get("model_kwargs") or {})}
    unused |= {key: args.pop(key) for key in args.keys() - OPTIONS}
    if unused := unused.keys() - {"impl", "recompute"}:  # these change no output
        _log.warning("%s: settings of its trainer are not used: %s", path, listed(sorted(unused)))
    cfg = {key: value for key, value in cfg.items() if value}
    return {"pretrained_cfg": cfg, "model_args": args}


def read_names(path: Path, contents: Contents, count: int) -> tuple[list[str] | None, bool]:
    """Return the names of `count` classes in a file, and whether idx_to_class has them.

    Names around the weights come first. If there are none, the log says which keys are not read.
    """
    keys = {name: match for name in contents.values if (match := _NAMES.fullmatch(name))}
    around = lambda name: contents.prefix.startswith(keys[name][1] or "")  # noqa: E731
    names, by_index, unread = None, False, []
    for name in sorted(keys, key=around, reverse=True):
        key, value = keys[name][2], contents.values[name]
        is_text = key == _BY_INDEX and isinstance(value, str)
        if not value or not (is_text or isinstance(value, dict | list | tuple)):
            continue
        texts = value if isinstance(value, dict) else dict(enumerate(value))
        kinds, found = str if texts is not value else (str, int), []
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if key != _BY_INDEX and all(isinstance(index, int) for index in texts.values()):
                texts = {index: text for text, index in texts.items()}
            texts = {int(index): text for index, text in texts.items()}
            found = [str(texts[i]) for i in range(len(value)) if isinstance(texts[i], kinds)]
        if is_text or len(found) != count:
            unread.append(name)
        elif names is None:
            names, by_index = found, key == _BY_INDEX
    if unread and names is None:
        text = "%s: its %s is not read: expected the names of %d classes, alone or by 0, 1, ..."
        _log.warning(text, path, listed(unread), count)
    return names, by_index


def _expect(fits: bool, expected: str, got: object) -> None:
    if not fits:
        raise InputError(f"expected {expected}, got {got!r:.80}")


def _dict_at(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    values = metadata.get(key, {})
    _expect(isinstance(values, dict), f"{key} with named values", values)
    return values


def _check_images(cfg: dict[str, Any], config: ModelConfig) -> None:
    channels = config.in_chans
    size = cfg.get("input_size", [channels, 1, 1])
    fits = isinstance(size, list) and len(size) == 3 and size[0] == channels
    _expect(fits, f"input_size ({channels}, height, width)", size)
    for key in ("mean", "std"):
        _expect(isinstance(cfg.get(key, []), list), f"{key} as a list of numbers", cfg.get(key))
    if "pixel_dtype" in cfg:
        statistics = [cfg.get("mean"), cfg.get("std")]
        numbers = [n for each in statistics for n in each or () if type(n) is float]
        finite = all(map(math.isfinite, numbers)) and len(numbers) == 2 * channels
        sound = channels != 3 and finite and min(cfg["std"]) > 0
        _expect(sound, f"mean and std of {channels} channels", statistics)
        _expect(isinstance(cfg["pixel_dtype"], str), "pixel_dtype as a name", cfg["pixel_dtype"])
    crop = {key: cfg[key] for key in CROP if key in cfg}
    check(EvalTransform(input_size=(size[1], size[2]), **crop), InputError, str)


def _check_user(user: dict[str, Any], config: ModelConfig) -> None:
    count = config.num_classes
    for key in ("classes", "descriptions"):
        if (names := user.get(key)) is not None:
            strings = isinstance(names, list) and all(isinstance(name, str) for name in names)
            _expect(strings, f"{key} as a list of names", names)
            _expect(len(names) == count or not count, f"the names of {count} classes", len(names))
    labels, threshold = user.get("labels", "single"), user.get("threshold")
    _expect(labels in ("single", "multi"), "labels 'single' or 'multi'", labels)
    if threshold is not None:
        several = isinstance(threshold, list)
        numbers = threshold if several else [threshold]
        fits = all(isinstance(n, int | float) and 0 <= n <= 1 for n in numbers)
        fits = fits and len(numbers) == (count if several else 1)
        what = f"a list of {count} numbers" if several else "a number"
        _expect(fits, f"threshold as {what} from 0 to 1", threshold)
