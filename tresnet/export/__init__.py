"""Models for other runtimes: ONNX, torch.export, AOTInductor, OpenVINO, in 32 or 8 bits.

from tresnet.export import ExportOptions, export_model, load_aoti

export_model(model.eval(), Path("model.onnx"), ExportOptions("onnx", input="uint8"))
"""

from tresnet.export.aoti import CompiledPackage, load_aoti
from tresnet.export.formats import FORMATS
from tresnet.export.write import Exported, ExportOptions, export_model

__all__ = ["FORMATS", "CompiledPackage", "ExportOptions", "Exported", "export_model", "load_aoti"]
