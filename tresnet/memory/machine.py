"""Fake GPU, made of fake tensors, a recorder, patches of torch, and backward in Python.

The steps of `tresnet.steps` call `FakeMachine.during`, which assigns operations to forward,
backward and optimizer.
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tresnet.errors import InputError
from tresnet.memory import patches
from tresnet.memory.backward import PythonEngine, SavedTensors
from tresnet.memory.device import MIB, Device
from tresnet.memory.recorder import Recorder
from tresnet.memory.trace import Category, Phase
from tresnet.ops.dispatch import fake_capability

# Sizes of DDP's gradient buckets; the first bucket is small, so that communication starts early.
_BUCKET_BYTES = 25 * MIB
_FIRST_BUCKET_BYTES = MIB


class FakeMachine:
    """Fake GPU, which runs code on tensors without data and records the code's allocations.

    `device_type` is `cuda` or `cpu`; None means `cuda`, or `cpu` if torch was built without CUDA.
    With `real_engine` (for tests; needs device type `cpu`), autograd's C++ engine runs backward.
    """

    def __init__(
        self, device: Device, *, real_engine: bool = False, device_type: str | None = None
    ) -> None:
        if device_type is None:
            device_type = "cuda" if torch.backends.cuda.is_built() else "cpu"
        self.device = torch.device("cuda:0" if device_type == "cuda" else device_type)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.recorder = Recorder(device_type, device)
        self.during = self.recorder.during
        self._capability = device.capability
        self._saved = SavedTensors()
        self._real_engine = real_engine
        self._buckets: _Buckets | None = None
        self._engine = PythonEngine(
            self._saved, sum_in_place=device_type == "cuda", on_gradient=self._gradient_arrived
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the `with` block on fake tensors, and record its operations."""
        with contextlib.ExitStack() as stack:
            stack.callback(fake_capability.reset, fake_capability.set(self._capability))
            stack.enter_context(self.mode)
            stack.enter_context(patches.emulated_gpu())
            stack.enter_context(self.recorder)
            if not self._real_engine:
                stack.enter_context(self._saved.recording())
                stack.enter_context(patches.backward_replaced(self._engine.backward))
                stack.enter_context(patches.saved_tensors_released(self._saved.release))
            yield

    def record_model(self, model: nn.Module, *, ddp: bool = False) -> None:
        """Record parameters and buffers with their modules; with `ddp`, also gradient buckets."""
        for list_tensors, category in (
            (model.named_parameters, Category.PARAMETERS),
            (model.named_buffers, Category.BUFFERS),
        ):
            for name, tensor in list_tensors(remove_duplicate=False):
                self.recorder.set_category([tensor], category, name.rpartition(".")[0])
        if ddp:
            self._buckets = _Buckets(model)
            with self.during(Phase.SETUP, Category.BUCKETS):
                self._buckets.allocate()
        self.recorder.master_weights.update(p.untyped_storage()._cdata for p in model.parameters())

    def start_step(self) -> None:
        """Mark the beginning of a step; before the second step, DDP rebuilds its buckets."""
        self.recorder.step += 1
        if self._buckets is not None and self.recorder.step == 2:
            with self.during(Phase.SETUP, Category.BUCKETS):
                self._buckets.allocate()

    def _gradient_arrived(self, parameter: torch.Tensor) -> None:
        if self._buckets is not None:
            self._buckets.move_gradient(parameter)
        if parameter.grad is not None:
            self.recorder.set_category([parameter.grad], Category.GRADIENTS)


class _Buckets:
    """Gradient buckets of DistributedDataParallel with `gradient_as_bucket_view`.

    In the first step, gradients lie in the buckets in reverse order of the parameters. From the
    second step on, they lie in the order in which backward computed them in the first step.
    """

    def __init__(self, model: nn.Module) -> None:
        # Reversed, because backward reaches the last parameters first.
        self._order = [p for p in model.parameters() if p.requires_grad][::-1]
        self._arrived: dict[torch.Tensor, None] = {}
        self._views: dict[torch.Tensor, torch.Tensor] = {}

    def allocate(self) -> None:
        self._order = [*self._arrived, *(p for p in self._order if p not in self._arrived)]
        self._views.clear()
        limits_bytes = [_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
        buckets, _ = torch.distributed._compute_bucket_assignment_by_size(self._order, limits_bytes)
        for indices in buckets:
            bucket = [self._order[index] for index in indices]
            sizes = [parameter.numel() for parameter in bucket]
            flat = bucket[0].new_empty(sum(sizes), requires_grad=False)
            self._views |= zip(bucket, flat.split(sizes), strict=True)

    def move_gradient(self, parameter: torch.Tensor) -> None:
        self._arrived.setdefault(parameter)
        view = self._views[parameter]
        parameter.grad = view.as_strided(parameter.shape, parameter.stride(), view.storage_offset())


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model to fake CPU tensors, outside `FakeMachine.running()`; tied weights stay tied."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise InputError(
                f"expected parameters and buffers with shapes, got uninitialised ones in "
                f"{type(model).__name__}: run one batch through the model first"
            )
        memo[id(tensor)] = _fake_like(tensor, mode)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}): "
            "pass a function that builds the model, for example predict(lambda: MyModel(), ...)"
        ) from error


def _fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, meta, torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        # Makes `fake` a parameter; nn.Parameter(fake) would be another tensor, made by `detach`.
        fake._is_param = True  # type: ignore[attr-defined]
        fake.requires_grad_(tensor.requires_grad)
    return fake
