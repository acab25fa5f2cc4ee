"""Export models to ONNX, torch.export, AOTInductor or OpenVINO, in float32 or 8-bit integers.

An example:

from tresnet.export import ExportOptions, export_model
export_model(model.eval(), Path("model.onnx"), ExportOptions("onnx", input="uint8"))
"""

from tresnet.export.formats import FORMATS, CompiledPackage, load_aoti
from tresnet.export.write import Exported, export_model
from tresnet.settings import ExportOptions

__all__ = ["FORMATS", "CompiledPackage", "ExportOptions", "Exported", "export_model", "load_aoti"]
