"""Whether data and the sites of a model fit each other: what is refused before a run, and what is warned of."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor

from pyro_sparse.inference.family import unwrapped
from pyro_sparse.inference.warning import warn
from pyro_sparse.models.layers import SparseModule

FAR = 10.0  # from unit scale: times as large, or a tenth at most

Node = dict[str, Any]


def checked_data(data: Any) -> tuple[Tensor, ...]:
    if isinstance(data, (Tensor, np.ndarray)):
        data = (data,)
    if not isinstance(data, (tuple, list)):
        raise TypeError(
            f"data must be a tuple of tensors or arrays, the arguments of the model, got {type(data).__name__}"
        )
    tensors = []
    for position, item in enumerate(data):
        if not isinstance(item, (Tensor, np.ndarray)):
            raise TypeError(f"data[{position}] must be a tensor or an array, got {type(item).__name__}")
        tensor = _of_array(item, position) if isinstance(item, np.ndarray) else item
        if tensor.layout != torch.strided:
            raise TypeError(f"data[{position}] must be dense, got {tensor.layout}: call .to_dense() on it")
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if tensor.dim() == 0 or len(tensor) == 0:
            raise ValueError(f"data[{position}] must have at least one row, got shape {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            row = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
            raise ValueError(f"data[{position}] must be finite, got NaN or infinity in row {row}")
        tensors.append(tensor)
    lengths = [len(t) for t in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"all of data must have the same number of rows, got {lengths}")
    return tuple(tensors)


def _of_array(array: np.ndarray[Any, Any], position: int) -> Tensor:
    """A copy: an array that is changed after the run must not change the refit."""
    if np.ma.is_masked(array):
        raise ValueError(f"data[{position}] must have no masked values, got {int(np.ma.count_masked(array))} of them")
    try:
        return torch.tensor(np.array(array, array.dtype.newbyteorder("=")))
    except TypeError as error:
        raise TypeError(f"data[{position}] must hold numbers, got an array of {array.dtype}") from error


def is_latent(node: Node) -> bool:
    return node["type"] != "sample" or not node["is_observed"]


def observed_sites(nodes: Mapping[str, Node]) -> dict[str, Node]:
    kept = {n: v for n, v in nodes.items() if v["type"] == "sample" and v["is_observed"]}
    kept = {n: v for n, v in kept.items() if not v["infer"].get("_deterministic")}
    if not kept:
        raise ValueError("model must have an observed site (obs=...), got none: was it called without its response?")
    for name, node in kept.items():
        _check_shape(name, node)
        _check_support(name, node)
    return kept


def _check_support(name: str, node: Node) -> None:
    """Raises where the response cannot come from its law, as a count below 0 of a Poisson law."""
    value = node["value"]
    if value.dtype == torch.bool:
        raise TypeError(f"the response of site '{name}' must be numbers, got truth values: call .float() on them")
    if not (node["mask"] is None or node["mask"] is True) or isinstance(node["fn"], MaskedDistribution):
        return  # rows that do not count may hold anything
    try:
        fits = node["fn"].support.check(value)
    except (NotImplementedError, AttributeError, RuntimeError):  # of laws that do not say
        return
    if not bool(fits.all()):
        place, law = tuple((~fits).nonzero()[0].tolist()), unwrapped(node["fn"])
        categorical = isinstance(law, torch.distributions.Categorical)
        rule = (
            f"be a class from 0 to {law.probs.shape[-1] - 1}"
            if categorical
            else f"lie in the support of {type(law).__name__}"
        )
        raise ValueError(
            f"the response of site '{name}' must {rule}, got "
            f"{value[place].tolist() if place else value.tolist()} in row {place[0] if place else 0}"
        )


def _check_shape(name: str, node: Node) -> None:
    """Raises where the response would be broadcast, (n, 1) against (n,): n² terms instead of n."""
    expected, got = torch.Size(node["fn"].shape()), node["value"].shape
    try:
        fits = torch.broadcast_shapes(expected, got) == got
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"the response of site '{name}' must have the shape of its distribution, {tuple(expected)}, got {tuple(got)}: "
            "squeeze or reshape one of them"
        )


def warn_of_columns(x: Tensor) -> None:
    """Where the default prior is far from what the inputs need: it would keep nothing, or everything."""
    if x.dim() != 2 or not x.is_floating_point():
        return
    size, largest = x.double().square().mean(0).sqrt(), x.abs().amax(0)
    far = ((size > FAR) | ((largest > 0) & (largest < 1 / FAR))).nonzero().flatten()
    if len(far):
        column = int(far[0])
        warn(
            f"{len(far)} column{'s' * (len(far) > 1)} of the first argument {'are' if len(far) > 1 else 'is'} far from unit "
            f"scale, which the default prior supposes (column {column}: root mean square {float(size[column]):.3g}): subtract "
            "means and divide by standard deviations, or set the prior"
        )


def warn_of_responses(observed: Mapping[str, Node]) -> None:
    """The same of a normal response that its mean at the start neither meets nor is scaled for."""
    for name, node in observed.items():
        law = unwrapped(node["fn"])
        if isinstance(law, torch.distributions.Normal) and node["value"].numel() > 2:
            apart = float((node["value"] - law.loc).detach().double().square().mean().sqrt())
            if apart > 2 * FAR and apart > 50 * float(law.loc.detach().double().std()):
                warn(
                    f"the response of site '{name}' is {apart:.3g} away from its mean at the start (root mean square), where "
                    "the default prior supposes about unit scale: subtract its mean and divide by its standard deviation, "
                    "inside the model or before, or set the prior"
                )


def rows_of_closure(observed: Mapping[str, Node]) -> int:
    sizes = [f.full_size or f.size for node in observed.values() for f in node["cond_indep_stack"]]
    if not sizes:
        raise ValueError("data must hold the arguments of the model, or its observed site must stand in a pyro.plate")
    return int(max(sizes))


def data_plates(observed: Mapping[str, Node], num_data: int) -> frozenset[str]:
    frames = [frame for node in observed.values() for frame in node["cond_indep_stack"]]
    return frozenset(f.name for f in frames if (f.full_size or f.size) == num_data)


def own_subsample_size(observed: Mapping[str, Node], plates: frozenset[str]) -> int | None:
    frames = [frame for node in observed.values() for frame in node["cond_indep_stack"] if frame.name in plates]
    sizes = {f.size for f in frames if f.full_size and f.size < f.full_size}
    if len(sizes) > 1:
        raise ValueError(f"all plates over the rows must have one subsample_size, got {sorted(sizes)}")
    return int(sizes.pop()) if sizes else None


def check_weight_of_few(observed: Mapping[str, Node], num_data: int, few: int, batch_size: int) -> None:
    """Whether a plate is only as large as what the model was given."""
    for name, node in observed.items():
        for frame in node["cond_indep_stack"]:
            if frame.size == few and (frame.full_size or few) == few:
                raise wrong_weight(frame.name, name, num_data, batch_size, 1.0)


def wrong_weight(plate: str, site: str, num_data: int, batch_size: int, got: float) -> ValueError:
    return ValueError(
        f"plate '{plate}' must weigh each row of a batch of {batch_size} by {num_data / batch_size:g} at site '{site}', got "
        f"{got:g}: write pyro.plate('{plate}', {num_data}, subsample_size=len(x)), a plate of the size of the batch does not "
        "scale the likelihood"
    )


def check_plates(observed: Mapping[str, Node], plates: frozenset[str], num_data: int, on_batches: bool) -> None:
    for name, node in observed.items():
        frames = node["cond_indep_stack"]
        fix = f"write `with pyro.plate('data', {num_data}, subsample_size=len(x)):` around it"
        if on_batches and not frames:
            raise ValueError(f"observed site '{name}' must stand in a plate over the rows to be run on batches: {fix}")
        # On all rows any plate will do, unless it scales the likelihood by a wrong number of rows.
        scaled = any(frame.full_size and frame.size != frame.full_size for frame in frames)
        if (on_batches or scaled) and not any(frame.name in plates for frame in frames):
            sizes = {frame.name: frame.full_size or frame.size for frame in frames}
            raise ValueError(f"observed site '{name}' must stand in a plate of size {num_data}, got {sizes}: {fix}")


def check_latents(nodes: Mapping[str, Node], subsampled: frozenset[str]) -> None:
    for name, node in nodes.items():
        if not is_latent(node) or node["type"] != "sample":
            continue
        plates = [frame.name for frame in node["cond_indep_stack"] if frame.name in subsampled]
        if plates:
            raise ValueError(
                f"latent site '{name}' must stand outside of the subsampled plate '{plates[0]}': "
                "a latent of each row cannot be sampled by batches; use batch_size=None or marginalise it"
            )


def check_buffers(modules: list[SparseModule]) -> None:
    for module in modules:
        for name, part in module.module.named_modules():
            moves = (
                isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.training and part.track_running_stats
            )
            if moves and part.momentum is None:
                raise ValueError(
                    f"momentum of '{module.site_name(name)}', a {type(part).__name__} in training mode, must be a number (0.1, "
                    "say): a plain average of all batches cannot be traced, got None"
                )
