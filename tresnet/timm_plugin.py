"""Register this package's models in timm, for `timm.create_model('tresnet_m')`.

Importing this module registers the models. timm's own scripts, unchanged, then run on these models:

    python -m tresnet.timm_plugin path/to/validate.py --model tresnet_m --pretrained ...
    torchrun --nproc-per-node 8 -m tresnet.timm_plugin path/to/train.py --model tresnet_m ...

The plugin replaces timm's models tresnet_m, tresnet_l, tresnet_xl and tresnet_v2_l. Weights have
the same tags and default tags as in timm. `create_model` also accepts the options of
`tresnet.create`, such as `norm`.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from timm.models import (
    generate_default_cfgs,
    load_pretrained,
    register_model,
    resolve_pretrained_cfg,
)
from timm.models._features import FeatureGetterNet
from torch import Tensor

from tresnet.checkpoints.creation import create
from tresnet.checkpoints.describe import Checkpoint, describe
from tresnet.checkpoints.fit import fit, load
from tresnet.checkpoints.locate import Published, Source, entries, from_layout, weights_dir
from tresnet.checkpoints.read import read_file, unwrap
from tresnet.errors import InputError
from tresnet.models.tresnet import TResNet, feature_extractor
from tresnet.models.zoo import default_pretrained_cfg, list_models, make_config


def _timm_cfg(entry: Published) -> dict[str, Any]:
    local = weights_dir() / entry.file
    file = str(local) if local.is_file() else None
    source = entries()[entry.copy] if entry.copy else entry  # an entry with a copy has a dead URL
    own = {"file": file, "url": source.url, "hf_hub_id": source.hub_id}
    return {**entry.pretrained_cfg, **own, "paper_ids": "arXiv:2003.13630"}


def _default_cfgs() -> dict[str, Any]:
    cfgs: dict[str, Any] = {}
    for name in list_models():
        common = default_pretrained_cfg(name, make_config(name))
        del common["pool_size"]  # depends on input_size, which a tag may change
        rows = [row for row in entries().values() if row.model == name]
        cfgs |= {row.tag: common | _timm_cfg(row) for row in rows} or {name: common}
    return generate_default_cfgs(cfgs)


def _create(
    name: str,
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> TResNet | FeatureGetterNet:
    if out_indices is not None and not features_only:
        raise InputError(f"out_indices={out_indices} needs features_only=True")
    kwargs.pop("pretrained_model_args", None)  # timm adds this, and `create` has no such option
    cfg = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay).to_dict()
    defaults = {"num_classes": cfg["num_classes"], "in_chans": cfg["input_size"][0]}
    model = create(name, **{**defaults, **kwargs})
    assert isinstance(model, TResNet)
    reduction = model.feature_info[-1]["reduction"]
    pool_size = tuple(side // reduction for side in cfg["input_size"][1:])
    model.pretrained_cfg = {**cfg, "pool_size": pool_size}
    if pretrained:
        _load(model, cfg, cache_dir)
    return feature_extractor(model, out_indices) if features_only else model


def _load(model: TResNet, cfg: dict[str, Any], cache_dir: str | Path | None) -> None:
    # A file is read here, because timm's reader would drop its metadata.
    if cfg.get("file") and not cfg.get("state_dict"):
        path = Path(cfg["file"])
        path = from_layout(str(path))[0] if path.is_dir() else path
        checkpoint = describe(Source(str(path), path), read_file(path), model.config)
        load(checkpoint, model, _needs_new_head(checkpoint, model))
        return
    load_pretrained(
        model,
        {**cfg, "first_conv": None},  # no layer for timm to adapt: `_convert` adapts the stem
        num_classes=model.num_classes,
        in_chans=model.in_chans,
        filter_fn=_convert,
        cache_dir=cache_dir,
    )


def _needs_new_head(checkpoint: Checkpoint, model: TResNet) -> bool:
    differs = checkpoint.num_classes != model.num_classes
    return not model.num_classes or (differs and not checkpoint.other_layers)


def _convert(state_dict: dict[str, Any], model: TResNet) -> dict[str, Tensor]:
    """Convert a state dict of any format for `model`; set the slopes of the model's leaky ReLUs."""
    cfg = model.pretrained_cfg
    name = Path(cfg.get("hf_hub_id") or cfg.get("url") or "the state dict")
    # If the classifier is new, timm checks no keys, so `fit` checks all of them.
    checkpoint = describe(Source(str(name), name), unwrap(state_dict, name), model.config)
    tensors = fit(checkpoint, model, _needs_new_head(checkpoint, model))
    model.set_slopes(checkpoint.config.stem_slope, checkpoint.config.block_slope)
    return tensors


def _entrypoint(name: str) -> Callable[..., TResNet | FeatureGetterNet]:
    def create(pretrained: bool = False, **kwargs: Any) -> TResNet | FeatureGetterNet:
        return _create(name, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"Build {name} of the package tresnet; see `timm.create_model`."
    return create


def _register() -> None:
    globals()["default_cfgs"] = _default_cfgs()  # timm reads `default_cfgs` of this module
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Overwriting tresnet_")
        for name in list_models():
            globals()[name] = register_model(_entrypoint(name))


def _run_script() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tresnet.timm_plugin SCRIPT [ARGUMENTS OF THE SCRIPT]")
    import runpy

    script = Path(sys.argv[1])
    if not script.is_file():
        sys.exit(f"error: expected a script of timm's, got {script}: there is no such file")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("tresnet.timm_plugin")
    _run_script()
else:
    _register()
