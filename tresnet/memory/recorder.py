"""Recorder of the operations and the storages of fake tensors (tensors without data)."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tresnet.memory.device import Device
from tresnet.memory.patches import GPU_KERNELS
from tresnet.memory.trace import Category, Operation, Phase, Trace
from tresnet.memory.workspaces import workspace_bytes

aten = torch.ops.aten

_BLAS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_DEFAULT_CATEGORY = {
    Phase.SETUP: Category.PARAMETERS,
    Phase.INPUT: Category.INPUT,
    Phase.FORWARD: Category.ACTIVATIONS,
    Phase.BACKWARD: Category.ACTIVATION_GRADIENTS,
    Phase.OPTIMIZER: Category.TEMPORARY,
}
# Results of `.item()` on fake tensors by phase and dtype; for other dtypes 1.0. In SETUP and
# OPTIMIZER the result does not affect memory. In other phases, FakeTensorMode raises an error.
_ITEM_RESULTS = {
    Phase.SETUP: {torch.bool: False},
    Phase.OPTIMIZER: {torch.bool: True, torch.int32: 1, torch.int64: 1},
}


class Recorder(TorchDispatchMode):
    """Dispatch mode that records in `trace` when storages on a device are allocated and freed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # avoids a slow wrapper that only torch.compile needs

    def __init__(self, device_type: str, device: Device) -> None:
        super().__init__()
        self.trace = Trace()
        self.phase = Phase.SETUP
        self.category: Category | None = None
        self.step = 0
        self._device_type = device_type
        self._device = device
        self._blas_handles: set[bool] = set()
        self._buffers: dict[int, tuple[int, weakref.ref]] = {}
        self.module = ""  # name of the module whose parameter or buffer was read last
        self._owners: dict[int, str] = {}
        # Storages of the parameters; autocast's copies of them have the category CAST_WEIGHTS.
        self.master_weights: set[int] = set()

    @contextlib.contextmanager
    def during(self, phase: str, category: Category | None = None) -> Iterator[None]:
        """Assign operations of the `with` block to a phase, and new storages to `category`."""
        before = self.phase, self.category
        self.phase, self.category = Phase(phase), category
        self.trace.operations.append(Operation(self.phase.value, self.phase, "", self.step))
        try:
            yield
        finally:
            self.phase, self.category = before
            self.module = ""

    def record_storage(self, tensor: torch.Tensor, category: Category | None = None) -> None:
        """Record a tensor's storage, if the storage is new and on the recorded device."""
        fake_device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if fake_device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._buffers:
            return
        category = category or self.category or _DEFAULT_CATEGORY[self.phase]
        buffer = self.trace.allocate(storage.nbytes(), category, self.module)

        def on_free(_: object, key: int = key, buffer: int = buffer) -> None:
            del self._buffers[key]
            self.master_weights.discard(key)
            self.trace.free(buffer)

        # The weak reference is stored, because `on_free` is called only while the reference exists.
        self._buffers[key] = buffer, weakref.ref(storage, on_free)

    def set_category(
        self, tensors: Iterable[object], category: Category, module: str | None = None
    ) -> None:
        """Set the category of the tensors' storages, and their module unless `module` is None.

        Storages that are not yet recorded are recorded. Objects that are not tensors are ignored.
        """
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                continue
            self.record_storage(tensor)
            key = tensor.untyped_storage()._cdata
            if key in self._buffers:
                buffer = self.trace.buffers[self._buffers[key][0]]
                buffer.category = category
                if module is not None:
                    buffer.module = self._owners[key] = module

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            # Half of all dispatches read `tensor.device`; FakeTensorMode's answer would be slower.
            fake = isinstance(args[0], FakeTensor)
            if fake and not args[0].fake_mode.in_kernel_invocation:
                return args[0].fake_device
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and self.phase in _ITEM_RESULTS:
            return _ITEM_RESULTS[self.phase].get(args[0].dtype, 1.0)
        if self.phase is Phase.OPTIMIZER and _is_in_place(func):
            return None
        if torch.is_inference_mode_enabled():  # torch dispatches composite operators undecomposed
            kernel = GPU_KERNELS.get(func) if self._device_type == "cuda" else None
            with self:  # so that this mode also records the operators of the decomposition
                out = (kernel or func.decompose)(*args, **kwargs)
            if out is not NotImplemented:
                return out
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self.module = self._owners.get(arg.untyped_storage()._cdata, self.module)
        operation = Operation(
            func._schema.name.replace("::", "."), self.phase, self.module, self.step
        )
        self.trace.operations.append(operation)
        if func in _BLAS:
            self._blas_workspace()
        out = func(*args, **kwargs)
        leaves = [out] if isinstance(out, torch.Tensor) else tree_leaves(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        category = None
        if func is aten._to_copy.default and self.phase is Phase.FORWARD:
            is_master = args[0].untyped_storage()._cdata in self.master_weights
            category = Category.CAST_WEIGHTS if is_master else None
        for tensor in tensors:
            self.record_storage(tensor, category)
        operation.shapes = tuple(tuple(t.shape) for t in tensors)
        expected_bytes, high_bytes = workspace_bytes(func, args, tensors)
        operation.workspace_high_bytes = high_bytes - expected_bytes
        if expected_bytes:
            buffer = self.trace.allocate(expected_bytes, Category.WORKSPACE, operation.module)
            self.trace.free(buffer)
        return out

    def _blas_workspace(self) -> None:
        """Record a cuBLAS workspace at the first matrix product of each thread (main, backward)."""
        handle = self.phase is Phase.BACKWARD
        n_bytes = self._device.cublas_workspace_bytes
        if n_bytes and handle not in self._blas_handles:
            self._blas_handles.add(handle)
            self.trace.allocate(n_bytes, Category.WORKSPACE, "")


def _is_in_place(func: Any) -> bool:
    """Return whether `func` is an in-place operator of an optimizer, which allocates nothing."""
    name = func._schema.name
    return name.startswith("aten::_amp_") or (
        name.startswith(("aten::_foreach_", "aten::_fused_")) and name.endswith("_")
    )
