"""TResNet image classifiers for GPUs: models, training, evaluation and benchmarks.

    import tresnet

    tresnet.list_models()
    model = tresnet.create("tresnet_m")
    model = tresnet.create("tresnet_m", weights="tresnet_m.miil_in1k")

Importing `tresnet` is quick, because each public name is imported at its first use. Importing any
module of the package does not initialise CUDA.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tresnet import export, fused, layers, memory, predictions, settings, surgery
    from tresnet.checkpoints.creation import create
    from tresnet.checkpoints.fit import load_checkpoint
    from tresnet.checkpoints.locate import list_weights
    from tresnet.checkpoints.save import save_checkpoint
    from tresnet.environment import __version__
    from tresnet.errors import TResNetError
    from tresnet.models.tresnet import TResNet
    from tresnet.models.zoo import list_models
    from tresnet.predictions.predictor import predict
    from tresnet.settings.model import ModelConfig

_MODULE_OF = {
    "__version__": "tresnet.environment",
    "ModelConfig": "tresnet.settings.model",
    "TResNet": "tresnet.models.tresnet",
    "TResNetError": "tresnet.errors",
    "create": "tresnet.checkpoints.creation",
    "list_models": "tresnet.models.zoo",
    "list_weights": "tresnet.checkpoints.locate",
    "load_checkpoint": "tresnet.checkpoints.fit",
    "predict": "tresnet.predictions.predictor",
    "save_checkpoint": "tresnet.checkpoints.save",
}

__all__ = [
    "ModelConfig", "TResNet", "TResNetError", "__version__", "create", "export", "fused",
    "layers", "list_models", "list_weights", "load_checkpoint", "memory", "predict", "predictions",
    "save_checkpoint", "settings", "surgery",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tresnet' has no attribute {name!r}")
    if name not in _MODULE_OF:
        return importlib.import_module(f"tresnet.{name}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
