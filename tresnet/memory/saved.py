"""Saved tensors held in boxes that the backward walk can empty.

The autograd engine releases what a node saved as soon as the node has run, while the node itself
may live on in the caller's `loss`. A walk in Python cannot release it, so every tensor saved for
backward is packed into a `Box` here, hooks of the model included (activation checkpointing,
`save_on_cpu`, our own `abn`), and `take_read` names the boxes a node has opened.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _autograd

PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]


class _Hooks:
    """A pair of hooks.

    Autograd owns both until the last tensor packed by them is released: so the scope and the full
    boxes own them, and nothing else may.
    """

    __slots__ = ("__weakref__", "pack", "unpack")

    def __init__(self, pack: PackHook, unpack: UnpackHook) -> None:
        self.pack = pack
        self.unpack = unpack


class Box:
    """What a pack hook returned, and its hooks, until `empty`."""

    __slots__ = ("__weakref__", "content", "hooks")

    def __init__(self, content: object, hooks: _Hooks) -> None:
        self.content: object = content
        self.hooks: _Hooks | None = hooks

    def empty(self) -> None:
        """Let go of the content and of the hooks."""
        self.content = self.hooks = None


class SavedTensors:
    """Boxes every tensor that autograd saves inside `recording()`."""

    def __init__(self) -> None:
        self._scopes: list[_Hooks] = []
        self._depth = 0
        self._read: list[Box] = []
        self._all: list[weakref.ref[Box]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Box all saved tensors, also those that go through hooks pushed inside."""
        push = _autograd._push_saved_tensors_default_hooks
        pop = _autograd._pop_saved_tensors_default_hooks

        def push_boxed(pack: PackHook, unpack: UnpackHook) -> None:
            push(*self._boxed(pack, unpack))

        def pop_boxed() -> None:
            pop()
            self._scopes.pop()

        _autograd._push_saved_tensors_default_hooks = push_boxed
        _autograd._pop_saved_tensors_default_hooks = pop_boxed
        push_boxed(_identity, _identity)
        try:
            yield
        finally:
            pop_boxed()
            _autograd._push_saved_tensors_default_hooks = push
            _autograd._pop_saved_tensors_default_hooks = pop
            # A box with the output of the node that owns it is a cycle nobody else can see.
            self.empty_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[list[Box]]:
        """The boxes opened inside, in order, except those opened while opening another."""
        outer, self._read = self._read, []
        depth, self._depth = self._depth, 0
        try:
            yield self._read
        finally:
            self._read, self._depth = outer, depth

    def empty_all(self) -> None:
        """Empty every box that is left, as a whole backward pass would."""
        for reference in self._all:
            box = reference()
            if box is not None:
                box.empty()
        self._all.clear()

    def _boxed(self, pack: PackHook, unpack: UnpackHook) -> tuple[PackHook, UnpackHook]:
        hooks = _Hooks(pack, unpack)
        self._scopes.append(hooks)
        reference = weakref.ref(hooks)

        # Autograd owns these two functions until the node dies: they must not own the hooks.
        def pack_box(tensor: torch.Tensor) -> Box:
            owner = reference()
            if owner is None:
                raise RuntimeError("a tensor was saved after its hooks were popped")
            box = Box(owner.pack(tensor), owner)
            self._all.append(weakref.ref(box))
            return box

        # torch.utils.checkpoint reads these: it must not take our boxing for a hook of the user.
        if pack is _identity or getattr(pack, "_checkpoint_internal", False):
            pack_box._checkpoint_internal = True  # type: ignore[attr-defined]
            pack_box._user_hooks = getattr(pack, "_user_hooks", None)  # type: ignore[attr-defined]
        return pack_box, self._unpack_box

    def _unpack_box(self, box: Box) -> torch.Tensor:
        if box.hooks is None:
            raise RuntimeError("a saved tensor was read after backward had released it")
        self._depth += 1
        try:
            tensor = box.hooks.unpack(box.content)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._read.append(box)
        return tensor


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
