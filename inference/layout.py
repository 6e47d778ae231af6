"""The position: every site of a model in one flat tensor, chains in front; a frozen layout names the parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints

from pyro_sparse.models.layers import SparseModule
from pyro_sparse.models.spike_slab import SpikeSlab


@dataclass(frozen=True)
class Site:
    """One part of the position."""

    name: str
    kind: str  # "spike_slab", "latent", "param", which has a flat prior, or "buffer", which the model itself moves
    shape: torch.Size  # on the unconstrained scale
    transform: Transform | None  # from the unconstrained scale to the support; None is the identity
    law: SpikeSlab | None  # of a spike-and-slab site, at its final spike
    module: SparseModule | None  # the network whose weight it is, and the weight's name there
    parameter: str | None


def group_of(site: Site) -> str:
    """The group of a trace that its values are in."""
    return "buffers" if site.kind == "buffer" else "posterior"


@dataclass(frozen=True)
class Layout:
    """The sites of a model in the order of its trace; buffers are last."""

    sites: tuple[Site, ...]

    @cached_property
    def sizes(self) -> list[int]:
        return [site.shape.numel() for site in self.sites]

    @property
    def num_coordinates(self) -> int:
        return sum(self.sizes)

    @cached_property
    def num_buffers(self) -> int:
        """Coordinates at the end of the position that no gradient moves: running statistics of BatchNorm."""
        return sum(site.shape.numel() for site in self.sites if site.kind == "buffer")

    def parameters(self, flat: Tensor) -> Tensor:
        """The part (..., num_coordinates - num_buffers) of ``flat`` that gradients move."""
        return flat[..., : flat.shape[-1] - self.num_buffers]

    def buffers(self, values: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Those of ``values``, flat."""
        parts = [values[site.name].reshape(-1) for site in self.sites if site.kind == "buffer"]
        return torch.cat(parts) if parts else like.new_empty(0)

    def __getitem__(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def spike_slab_sites(self) -> list[Site]:
        return [site for site in self.sites if site.law is not None]

    def modules(self) -> list[SparseModule]:
        """The sparse networks of the model, each once."""
        return list({id(s.module): s.module for s in self.sites if s.module is not None}.values())

    def of_module(self, module: SparseModule) -> dict[str, Site]:
        """The sites of one network by parameter name."""
        return {s.parameter: s for s in self.sites if s.module is module and s.parameter is not None}

    def parts(self, flat: Tensor) -> Iterator[tuple[Site, Tensor]]:
        """Each site with its part of ``flat`` (..., num_coordinates), reshaped to (..., *site.shape)."""
        # split, not slices: its gradient is one concatenation.
        for site, part in zip(self.sites, flat.split(self.sizes, -1), strict=True):
            yield site, part.reshape((*flat.shape[:-1], *site.shape))

    def constrained(self, position: Tensor) -> dict[str, Tensor]:
        """The value of every site, on its support."""
        return self.constrained_with_log_jacobian(position)[0]

    def unconstrained(self, values: Mapping[str, Tensor]) -> Tensor:
        """The position of the given values; inverse of :meth:`constrained`."""
        parts = [values[s.name] if s.transform is None else s.transform.inv(values[s.name]) for s in self.sites]
        return torch.cat([part.reshape(-1) for part in parts])

    def constrained_with_log_jacobian(self, position: Tensor) -> tuple[dict[str, Tensor], Tensor | float]:
        """The value of every site, and log |d value / d position| summed over the sites that are constrained."""
        values: dict[str, Tensor] = {}
        total: Tensor | float = 0.0
        for site, part in self.parts(position):
            values[site.name] = part if site.transform is None else site.transform(part)
            if site.transform is not None:
                total = total + site.transform.log_abs_det_jacobian(part, values[site.name]).sum()
        return values, total

    def flat(self, per_site: Mapping[str, Any], default: Any, like: Tensor) -> Tensor:
        """A flat tensor of the position's length from a value or tensor per site; ``default`` for sites left out."""
        dtype = torch.bool if isinstance(default, bool) else like.dtype
        parts = [torch.as_tensor(per_site.get(s.name, default), dtype=dtype, device=like.device) for s in self.sites]
        return torch.cat([p.expand(s.shape).reshape(-1) for s, p in zip(self.sites, parts, strict=True)])

    def included(self, position: Tensor) -> Tensor:
        """The position with the weights at 0 that it does not include: of inclusion probability 1/2 or less."""
        thresholds = self.thresholds(position)
        return torch.where((position.abs() > thresholds) | thresholds.isinf(), position, 0.0)

    def thresholds(self, like: Tensor) -> Tensor:
        """|weight| above which a weight is included at the final spike; infinite for sites that are never counted."""
        return self.flat({s.name: s.law.inclusion_threshold for s in self.sites if s.law}, torch.inf, like)


_AXES = {
    **{("weight", 1): ("out",), ("weight", 2): ("out", "in"), ("weight", 4): ("out", "in", "row", "column")},
    **{(name, 1): ("out",) for name in ("bias", "running_mean", "running_var")},
}


def named_dims(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    """Names of the axes of every site in a dataset: those of its layer, which its weights share, or ArviZ's.

    "layer1.weight" (20, 100) has dims "layer1_out", "layer1_in" and "layer1.bias" (20,) "layer1_out", unless the sizes of a
    layer contradict each other; "sigma" (3,) has "sigma_dim_0".
    """
    sizes: dict[str, int] = {}
    found = {}
    for name, shape in shapes.items():
        layer, _, parameter = name.rpartition(".")
        axes = _AXES.get((parameter, len(shape)), ()) if layer else ()
        dims = tuple(f"{layer}_{axis}" for axis in axes)
        if not axes or any(sizes.get(dim, size) != size for dim, size in zip(dims, shape, strict=True)):
            dims = tuple(f"{name}_dim_{axis}" for axis in range(len(shape)))
        sizes |= dict(zip(dims, shape, strict=True))
        found[name] = dims
    return found


def bijection(support: Any) -> Transform | None:
    """The bijection of Pyro from the real numbers to ``support``; None where it is the identity."""
    base = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    if base is constraints.real or base is constraints.real_vector:
        return None
    transform: Transform = biject_to(support)
    return transform
