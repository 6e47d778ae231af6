"""A traced program made short, and compiled where a run is long enough to repay it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass

Program = Callable[..., Any]

_NEUTRAL = {"mul": ((1,),), "pow": ((1,),), "add": ((0,),)}  # second arguments that change nothing
# Operations whose Python function takes the same arguments.
_NAMES = (
    "add addmm cat div exp expand index_add index_select log mm mul neg pow reciprocal rsub select squeeze stack sub sum t "
    "tanh unbind unsqueeze view where"
)
_BOUND = frozenset(_NAMES.split())


def traced(function: Program, arguments: tuple[Any, ...]) -> torch.fx.GraphModule:
    """The operations of the function in a row, for arguments of these shapes.

    Raises:
        Exception: whatever the function does that cannot be traced.
    """
    # Without this context make_fx sets up a mode of its own for each value: more than half of its time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(function)(*arguments)


def tidied(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same program with what stands in it twice computed once, and what depends on constants alone beforehand."""
    if any(_mutates(node.target) for node in graph.graph.nodes):
        return graph
    random = {node.target.overloadpacket for node in graph.graph.nodes if is_random(node)}
    # A BatchNorm advances its statistics, which its schema does not say: called twice, it does so twice.
    merged = CSEPass(random | {torch.ops.aten.native_batch_norm})(graph)
    graph = merged.graph_module if merged is not None else graph
    known: dict[torch.fx.Node, Tensor] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(graph, str(node.target))
        elif _is_known(node, known):
            arguments = torch.fx.map_arg((node.args, node.kwargs), lambda n: known[n])
            value = node.target(*arguments[0], **arguments[1])
            if not isinstance(value, Tensor):
                continue
            known[node] = value
            name = f"_known_{len(known)}"
            graph.register_buffer(name, value)
            with graph.graph.inserting_before(node):
                constant = graph.graph.get_attr(name)
            known[constant] = value
            node.replace_all_uses_with(constant)
    for node in graph.graph.nodes:
        _shorten(node)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.target = _binding(node.target)
    graph.recompile()
    return graph


def _shorten(node: torch.fx.Node) -> None:
    """Drops what autograd leaves behind: factors of 1, terms of 0, views of views, transposes of transposes."""
    name = _name(node.target)
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return
    inner, others = node.args[0], node.args[1:]
    same = _form(node) is not None and _form(node) == _form(inner)
    neutral = others in _NEUTRAL.get(name, ())
    if same and (neutral or name in ("view", "expand")):
        node.replace_all_uses_with(inner)
    elif name == "view" and getattr(inner.target, "__name__", "") == getattr(node.target, "__name__", ""):
        node.args = (inner.args[0], *others)
    elif name == "t" and inner.target == node.target and isinstance(inner.args[0], torch.fx.Node):
        node.replace_all_uses_with(inner.args[0])


def _form(node: torch.fx.Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    return (value.shape, value.dtype, value.stride()) if isinstance(value, Tensor) else None


def _binding(target: Any) -> Any:
    """PyTorch's own Python function of an operation, which is called in half the time of the operation itself."""
    name, _, _ = getattr(target, "__name__", "").partition(".")
    if getattr(target, "namespace", "") != "aten" or name not in _BOUND:
        return target
    return getattr(torch, name, None) or getattr(Tensor, name)


def _is_known(node: torch.fx.Node, known: dict[torch.fx.Node, Tensor]) -> bool:
    """Whether a call depends on constants alone; a random number never does."""
    constant = bool(node.all_input_nodes) and all(n in known for n in node.all_input_nodes)
    return node.op == "call_function" and constant and not is_random(node)


def varying_shape(graph: torch.fx.GraphModule, num_varying: int) -> str | None:
    """What is wrong where a result may have another shape at other values of the first arguments: in the graph it has one.

    So has what a boolean index, ``nonzero`` or ``unique`` of values gives.
    """
    varying: set[torch.fx.Node] = set()
    for number, node in enumerate(graph.graph.nodes):  # the arguments come first
        if number < num_varying or varying.intersection(node.all_input_nodes):
            varying.add(node)
            if torch.Tag.dynamic_output_shape in _tags(node.target) and not _takes_numbers(node, varying):
                return f"the shape of what '{_name(node.target)}' gives depends on values (torch.where keeps one shape)"
    return None


def _takes_numbers(node: torch.fx.Node, varying: set[torch.fx.Node]) -> bool:
    """Whether it is an index by row numbers, of which there are as many at any values."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    kinds = [getattr(index.meta.get("val"), "dtype", None) for index in node.args[1] if index in varying]  # type: ignore
    return not {torch.bool, torch.uint8, None}.intersection(kinds)


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target)).partition(".")[0]


def is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in _tags(node.target)


def _mutates(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _tags(target: Any) -> tuple[Any, ...]:
    return tuple(getattr(target, "tags", ()))


def repays_compiling(num_steps: int, num_coordinates: int, on_card: bool = False) -> bool:
    """Whether a run is expected to save more than the 20 s that compiling may take, or on a card a minute.

    By counts, never by a clock: the same run makes the same choice everywhere and whenever it is resumed. Measured on one
    thread (benchmarks/step.py), compiling takes 5 to 20 s, and a step saves half a millisecond, for the operations it need
    not start, and 15 to 60 ns a coordinate. On a card a millisecond a step is reckoned, for the same reason.
    """
    if on_card:
        return num_steps > 60_000
    return num_steps * (5e-4 + 1.5e-8 * num_coordinates) > 20


def compiled(function: Program, arguments: tuple[Any, ...]) -> Program:
    """The function as PyTorch's compiler leaves it, for arguments of these shapes. Arrays that it writes over are written over.

    Raises:
        Exception: whatever a missing or failing compiler raises.
    """
    from torch import _inductor  # two seconds, which only a long run need spend

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler about itself
        graph = traced(function, arguments)
        # Handed to the compiler as it is: what torch.compile would put around it to watch for other shapes costs a fifth of a
        # small step. Its patterns would add a prior's gradient inside the product that yields the network's: two passes more.
        run: Program = _inductor.compile(graph, list(arguments), options={"pattern_matcher": False})
        run(*arguments)
    return run
