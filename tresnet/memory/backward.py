"""Backward in Python: nodes run and tensors are freed in the order of autograd's C++ engine.

The C++ engine rejects fake tensors on a device that this machine lacks. `PythonEngine` therefore
calls the nodes of the autograd graph itself. A node is ready when all its gradients have arrived.
Ready leaves run first. Other ready nodes run by descending sequence number. Tests compare both
engines on fake CPU tensors.

The C++ engine releases a node's saved tensors after the node has run, even if the loss keeps the
node alive. Python code cannot release saved tensors. `SavedTensors` therefore packs each saved
tensor into a `Box`, which can be emptied. Activation checkpointing and `save_on_cpu` are supported.
"""

import contextlib
import heapq
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _autograd

from tresnet.memory import patches

Node = Any  # torch.autograd.graph.Node, or the Python node of a custom Function
Gradients = list[torch.Tensor | None]

# sys.getrefcount of a tensor in one local variable; the call's argument is the second reference.
_LOCAL = 2
# Use count of a storage that one tensor owns. The query of the count is a second user.
_LONE_STORAGE = 2


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Hooks:
    """Saved-tensor hooks, which are freed when they are popped and no `Box` holds them any more."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Box:
    """Result of a pack hook, with the hooks that unpack it; `empty` releases result and hooks."""

    content: object
    hooks: _Hooks | None

    def empty(self) -> None:
        self.content = self.hooks = None


class SavedTensors:
    """Tensors that autograd saves in a `recording()` block, each in a `Box`."""

    def __init__(self) -> None:
        self._scopes: list[_Hooks] = []
        self._depth = 0
        self._read: list[Box] = []
        self._all: list[weakref.ref[Box]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Put each saved tensor into a `Box`; the model's hooks, if any, pack the tensor first."""
        with patches.saved_tensor_hooks_replaced(self._boxed, self._scopes.pop):
            _autograd._push_saved_tensors_default_hooks(_identity, _identity)
            try:
                yield
            finally:
                _autograd._pop_saved_tensors_default_hooks()
                # Breaks a reference cycle: the `Box` of a node's own output holds this node.
                self.empty_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Run the `with` block; then empty each `Box` that it has read outside of unpack hooks."""
        outer, self._read = self._read, []
        depth, self._depth = self._depth, 0
        try:
            yield
            self.release()
        finally:
            self._read, self._depth = outer, depth

    def release(self) -> None:
        """Empty each `Box` from which the running autograd node has read a saved tensor."""
        for box in self._read:
            box.empty()

    def empty_all(self) -> None:
        """Empty every `Box`, even if no node has read it."""
        boxes, self._all = self._all, []
        for reference in boxes:
            if (box := reference()) is not None:
                box.empty()

    def _boxed(self, pack: Any, unpack: Any) -> tuple[Any, Any]:
        hooks = _Hooks(pack, unpack)
        self._scopes.append(hooks)
        reference = weakref.ref(hooks)

        # The graph node that saves a tensor owns pack_box until the node is freed. A weak reference
        # in pack_box lets `hooks` be freed before the node.
        def pack_box(tensor: torch.Tensor) -> Box:
            owner = reference()
            if owner is None:
                raise RuntimeError("a tensor was saved after its hooks were popped")
            box = Box(owner.pack(tensor), owner)
            self._all.append(weakref.ref(box))
            return box

        # torch.utils.checkpoint reads these attributes to distinguish our hooks from a user's.
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


class PythonEngine:
    """Engine that runs the autograd nodes of backward; `saved` has the tensors that forward saved.

    With `sum_in_place`, gradients are added in place where the C++ engine does so with real
    tensors. Otherwise gradients are never added in place, as in the C++ engine with fake tensors.
    `on_gradient` is called with each leaf whose `.grad` has changed.
    """

    def __init__(
        self,
        saved: SavedTensors,
        *,
        sum_in_place: bool = True,
        on_gradient: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._saved = saved
        self._sum_in_place = sum_in_place
        self._depth = 0
        self._on_gradient = on_gradient or (lambda parameter: None)

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        *_: object,
        **__: object,
    ) -> None:
        """Accumulate gradients of `tensors` into the leaves, like `torch.autograd.backward`.

        The graph is always freed; `retain_graph` is ignored. Nodes may call `backward` recursively.
        """
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if grad_tensors is None or isinstance(grad_tensors, torch.Tensor):
            seeds: Gradients = [grad_tensors] * len(roots)
        else:
            seeds = list(grad_tensors)
        self._depth += 1
        with torch.no_grad(), patches.graph_task():
            task = _Task(self._sum_in_place)
            for index, root in enumerate(roots):
                seed, seeds[index] = seeds[index], None
                seed = torch.ones_like(root) if seed is None else seed
                task.add(root.grad_fn, root.output_nr, seed)
                del seed  # a reference left here would prolong the life of the gradient
            task.count_dependencies()
            while (ready := task.pop_ready()) is not None:
                node, gradients = ready
                del ready
                self._run(task, node, gradients)
                del node, gradients
        self._depth -= 1
        if self._depth == 0:
            self._saved.empty_all()  # frees even tensors that no node has read

    def _run(self, task: "_Task", node: Node, gradients: Gradients) -> None:
        if _is_leaf(node):
            self._accumulate(node.variable, gradients)
            return
        edges = node.next_functions
        with self._saved.reading():
            results = _call(node, gradients, edges)
        for index, (target, input_nr) in enumerate(edges):
            gradient, results[index] = results[index], None
            if target is None:
                continue
            if gradient is not None:
                task.add(target, input_nr, _fit(gradient, target._input_metadata[input_nr]))
            del gradient
            task.finish_edge(target)

    def _accumulate(self, leaf: torch.Tensor, gradients: Gradients) -> None:
        gradient = gradients.pop()
        if gradient is None:
            return
        if leaf.grad is not None:
            leaf.grad.add_(gradient)
        elif sys.getrefcount(gradient) <= _LOCAL and _layout_follows(gradient, leaf):
            leaf.grad = gradient
        else:
            like_leaf = torch.empty_like(leaf, memory_format=torch.preserve_format)
            leaf.grad = like_leaf.copy_(gradient)
        self._on_gradient(leaf)
        for hook in (getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(leaf)


class _Task:
    def __init__(self, sum_in_place: bool) -> None:
        self._sum_in_place = sum_in_place
        self._buffers: dict[Node, Gradients] = {}
        self._dependencies: dict[Node, int] = {}
        self._ready: list[tuple[int, int, Node]] = []
        self._order = itertools.count()

    def add(self, node: Node, input_nr: int, gradient: torch.Tensor) -> None:
        buffer = self._buffers.setdefault(node, [None] * len(node._input_metadata))
        if buffer[input_nr] is None:
            buffer[input_nr] = gradient
        else:
            _add(buffer, input_nr, gradient, in_place=self._sum_in_place)

    def count_dependencies(self) -> None:
        """Count the edges into each node; roots without an edge into them are ready to run."""
        todo = list(self._buffers)
        roots, seen = list(todo), set(todo)
        while todo:
            for target, _ in todo.pop().next_functions:
                if target is None:
                    continue
                self._dependencies[target] = self._dependencies.get(target, 0) + 1
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        for node in roots:
            if node not in self._dependencies:
                self._push(node)

    def finish_edge(self, node: Node) -> None:
        self._dependencies[node] -= 1
        if self._dependencies[node] == 0:
            del self._dependencies[node]
            self._push(node)

    def pop_ready(self) -> tuple[Node, Gradients] | None:
        """Return the next ready node and its gradients, and forget both; return None at the end."""
        if not self._ready:
            return None
        node = heapq.heappop(self._ready)[2]
        return node, self._buffers.pop(node, None) or [None] * len(node._input_metadata)

    def _push(self, node: Node) -> None:
        # Leaves run before all other nodes.
        first = -(2**63) if _is_leaf(node) else -node._sequence_nr()
        heapq.heappush(self._ready, (first, next(self._order), node))


def _call(node: Node, gradients: Gradients, edges: tuple) -> Gradients:
    """Run one node; empty the list `gradients`, so that the node can free the gradients."""
    if hasattr(node, "_forward_cls"):
        return _call_custom(node, gradients, edges)
    arguments = tuple(gradients)
    gradients.clear()
    results = node(*arguments)
    return list(results) if isinstance(results, tuple | list) else [results]


def _call_custom(node: Node, gradients: Gradients, edges: tuple) -> Gradients:
    """Run a custom Function's backward; drop its results for inputs that need no gradient."""
    for index, meta in enumerate(node._input_metadata):
        if gradients[index] is None and patches.wants_zeros(node):
            gradients[index] = torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
    arguments = tuple(gradients)
    gradients.clear()
    results = node.apply(*arguments)
    results = list(results) if isinstance(results, tuple | list) else [results]
    needed_results = iter(
        [result for result, needed in zip(results, node.needs_input_grad, strict=False) if needed]
    )
    return [None if target is None else next(needed_results) for target, _ in edges]


def _fit(gradient: torch.Tensor, meta: Any) -> torch.Tensor:
    # Sum over broadcast dimensions, then cast, like `validate_outputs` in torch's engine.cpp.
    shape = tuple(meta.shape)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    return gradient if gradient.dtype == meta.dtype else gradient.to(meta.dtype)


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _add(buffer: Gradients, index: int, gradient: torch.Tensor, *, in_place: bool) -> None:
    """Add `gradient` to `buffer[index]`, with `in_place` into that tensor if it is not shared."""
    accumulated, buffer[index] = buffer[index], None
    assert accumulated is not None
    if (
        in_place
        and sys.getrefcount(accumulated) <= _LOCAL
        and torch._C._storage_Use_Count(accumulated.untyped_storage()._cdata) <= _LONE_STORAGE
    ):
        buffer[index] = accumulated.add_(gradient)
    else:
        buffer[index] = accumulated + gradient


def _layout_follows(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Return whether `gradient` has the strides of `leaf`, except in dimensions of size one."""
    return all(
        size == 1 or mine == theirs
        for size, mine, theirs in zip(leaf.shape, gradient.stride(), leaf.stride(), strict=True)
    )
