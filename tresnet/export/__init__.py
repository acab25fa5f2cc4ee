"""Export models to ONNX, torch.export, AOTInductor or OpenVINO, in float32 or 8-bit integers.

An example:

from tresnet.export import ExportOptions, export_model
export_model(model.eval(), Path("model.onnx"), ExportOptions("onnx", input="uint8"))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tresnet.export.formats import FORMATS, CompiledPackage, load_aoti
    from tresnet.export.options import ExportOptions
    from tresnet.export.write import Exported, export_model

__all__ = ["FORMATS", "CompiledPackage", "ExportOptions", "Exported", "export_model", "load_aoti"]


def __getattr__(name: str) -> Any:
    """Import attributes lazily, because the help of `tresnet export` needs only the options."""
    if name not in __all__:
        raise AttributeError(f"module 'tresnet.export' has no attribute {name!r}")
    from tresnet.export import formats, write

    return getattr(write, name, None) or getattr(formats, name)
