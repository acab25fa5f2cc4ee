"""Branches of equal structure as one module whose convolutions and norms run in groups."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from torch import fx, nn

from tresnet.errors import InputError
from tresnet.surgery import merge_calls
from tresnet.surgery.merge_checks import check_equal, find_leaves
from tresnet.surgery.merge_rules import State, is_leaf, merge_leaf
from tresnet.surgery.parallel import ParallelBranches


def merge_parallel(branches: Iterable[nn.Module], *, shared_input: bool = True) -> ParallelBranches:
    """Return one module that runs G branches at once; weights are copied, branches unchanged.

    Outputs are those of the branches concatenated along dimension 1, and gradients theirs, in eval
    and in training mode; `split` gives the branches back. Branches may consist of convolutions,
    batch norms (plain or with activation), linear layers (which may differ in their number of
    outputs), pools, activations, squeeze and excite, `nn.Sequential` and blocks of ours or others
    (torchvision's, timm's) that add, subtract, multiply or divide intermediate results. Dropout and
    drop path drop as often, but other values. Of numbers of batches that differ between branches,
    the first is kept.

    Args:
        branches: G modules of equal structure, each of one tensor argument.
        shared_input: all branches read the same (N, C, ...); else branch g reads the g-th C
            channels of (N, G C, ...).

    Returns:
        The merged module.

    Raises:
        InputError: the branches differ in structure, or hold something that has no rule; names it.
    """
    if not isinstance(branches, Iterable):
        raise InputError(f"expected a list of branches to merge, got {type(branches).__name__}")
    modules = list(branches)
    if not modules:
        raise InputError("expected at least one branch to merge, got none")
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise InputError(f"expected modules to merge, but branch {index} is {module!r}")
    if any(is_leaf(module) for module in modules):
        chains = [_wrapped(module) for module in modules]
        merged = ParallelBranches(_build(chains, shared_input), chains, shared_input)
        merged.wrapped = True
        return merged
    return ParallelBranches(_build(modules, shared_input), modules, shared_input)


def _wrapped(leaf: nn.Module) -> nn.Sequential:
    chain = nn.Sequential(leaf)
    chain.training = leaf.training
    return chain


def _build(modules: Sequence[nn.Module], shared_input: bool) -> fx.GraphModule:
    graphs = [_trace(module, index) for index, module in enumerate(modules)]
    check_equal(modules, graphs)
    return _Merger(modules, graphs[0], shared_input).run()


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Stop at the layers that have a rule."""
        return is_leaf(m)


def _trace(module: nn.Module, index: int) -> fx.Graph:
    """Return the steps of a branch, which must be the same in training and in evaluation."""
    what = f"branch {index} ({type(module).__name__})"
    training = {inner: inner.training for inner in module.modules()}
    graphs = []
    try:
        for mode in (True, False):
            for inner in training:  # not train(), which people override
                inner.training = mode
            graphs.append(_Tracer().trace(module))
    except Exception as error:  # whatever the branch's own code raises on symbolic values
        raise InputError(
            f"{what} cannot be traced: {error}. Expected a forward whose steps do not depend on "
            "values or sizes"
        ) from error
    finally:
        for inner, was in training.items():
            inner.training = was
    for steps in zip_longest(*(graph.nodes for graph in graphs)):
        trained, evaluated = (None if step is None else step.format_node() for step in steps)
        if trained != evaluated:
            raise InputError(
                f"{what} takes other steps in training than in evaluation, from {steps[0]} and "
                f"{steps[1]} on: expected layers that know the difference, such as nn.Dropout"
            )
    return graphs[0]


class _Merger:
    """One pass over the graph of the first branch, value by value."""

    def __init__(self, modules: Sequence[nn.Module], graph: fx.Graph, shared_input: bool) -> None:
        self._modules = modules
        self._source = graph
        self._graph = fx.Graph()
        self._entry: State = "shared" if shared_input else "grouped"
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._states: dict[fx.Node, State | None] = {}
        self._spread: dict[fx.Node, fx.Node] = {}
        self._root: dict[str, nn.Module] = {}
        self._wanted: dict[str, State] = {}
        self._after: dict[str, State] = {}

    def run(self) -> fx.GraphModule:
        """Return the merged module.

        Raises:
            InputError: a step has no rule, or a layer with parameters is never used.
        """
        handlers = {
            "placeholder": self._placeholder,
            "call_module": self._module,
            "call_function": self._call,
            "call_method": self._call,
            "output": self._output,
        }
        for node in self._source.nodes:
            if node.op not in handlers:
                raise InputError(
                    f"the branches read the tensor {node.target} itself: expected parameters and "
                    "buffers in layers alone"
                )
            handlers[node.op](node)
        for name, leaf in find_leaves(self._modules[0]).items():
            if name not in self._root and any(True for _ in leaf.parameters()):
                raise InputError(f"{name} has parameters but is never used: remove it first")
        self._graph.lint()
        return fx.GraphModule(self._root, self._graph, "MergedBranches")

    def _put(self, node: fx.Node, new: fx.Node, state: State | None) -> None:
        self._nodes[node], self._states[node] = new, state

    def _placeholder(self, node: fx.Node) -> None:
        if self._nodes:
            raise InputError(f"the branches take a second argument, {node.name}: expected one")
        self._put(node, self._graph.placeholder(node.name), self._entry)

    def _module(self, node: fx.Node) -> None:
        name, source = str(node.target), node.args[0]
        if len(node.args) != 1 or node.kwargs or not isinstance(source, fx.Node):
            raise InputError(f"{name} is called with more than one tensor")
        state = self._state(source)
        if name not in self._root:
            leaves = [module.get_submodule(name) for module in self._modules]
            self._root[name], self._wanted[name], self._after[name] = merge_leaf(
                leaves, state, name
            )
        wanted, after = self._wanted[name], self._after[name]
        if not any(True for _ in self._root[name].parameters()):
            wanted, after = merge_leaf([self._modules[0].get_submodule(name)], state, name)[1:]
        argument = self._as(source, wanted, name)
        self._put(node, self._graph.call_module(name, (argument,)), after)

    def _state(self, node: fx.Node) -> State:
        state = self._states[node]
        if state is None:
            raise InputError(f"{node.name} is a size, used as a tensor")
        return state

    def _as(self, node: fx.Node, wanted: State, name: str) -> fx.Node:
        """Return a value in the state that is wanted."""
        state, new = self._state(node), self._nodes[node]
        if state == wanted:
            return new
        if (state, wanted) != ("shared", "grouped"):
            raise InputError(f"{name} is used twice, on values of different kinds")
        if node not in self._spread:
            self._spread[node] = self._graph.call_function(
                merge_calls.spread, (new, len(self._modules))
            )
        return self._spread[node]

    def _call(self, node: fx.Node) -> None:
        tensors = [n for n in node.all_input_nodes if self._states[n] is not None]
        if merge_calls.is_size(node) or not tensors:
            self._put(node, self._copied(node), None)
            return
        merge_calls.check_sizes(node, self._states)
        if merge_calls.is_binary(node):
            self._join(node, tensors)
            return
        if len(tensors) > 1:
            raise InputError(
                f"the branches join several tensors in {node.name}: expected sums, differences, "
                "products or quotients of two"
            )
        state = self._state(tensors[0])
        merge_calls.check_unary(node, state)
        self._put(node, self._copied(node), state)

    def _copied(self, node: fx.Node) -> fx.Node:
        return self._graph.node_copy(node, lambda old: self._nodes[old])

    def _join(self, node: fx.Node, tensors: list[fx.Node]) -> None:
        operation = merge_calls.binary(node)
        states = [self._state(tensor) for tensor in tensors]
        if node.kwargs:
            raise InputError(f"{node.name} has options {dict(node.kwargs)}: expected two operands")
        if len(states) == 1 or states in (["shared"] * 2, ["ragged"] * 2):
            arguments = fx.map_arg(node.args, lambda old: self._nodes[old])
            self._put(node, self._graph.call_function(operation, arguments), states[0])  # pyright: ignore[reportArgumentType]
            return
        if "ragged" in states:
            raise InputError(
                f"{node.name} joins outputs of different numbers for each branch with others"
            )
        operands = [self._nodes[tensor] for tensor in tensors]
        shared = [state == "shared" for state in states]
        arguments = (operation.__name__, *operands, len(self._modules), *shared)
        joined = self._graph.call_function(merge_calls.join, arguments)
        self._put(node, joined, "grouped")

    def _output(self, node: fx.Node) -> None:
        result = node.args[0]
        if not isinstance(result, fx.Node):
            raise InputError("the branches return more than one tensor: expected one")
        state = self._state(result)
        self._graph.output(self._as(result, "grouped" if state == "shared" else state, "output"))
