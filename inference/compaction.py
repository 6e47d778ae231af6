"""The same model on the small networks that its kept weights leave: what a refit and a prediction differentiate.

A network of linear layers with 2,000 inputs, of which its kept weights read 5, is computed on those 5 and on its live units
alone. Any other network, and sites that belong to none, stay as they are.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.nn import functional

from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.layout import Layout
from pyro_sparse.inference.structure import Layer, linear_chain
from pyro_sparse.models.layers import SparseModule

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Compacted:
    """A model on its small networks.

    Attributes:
        spec: of that model; its layout has the shapes of the small networks.
        where: for each kept coordinate, where it stands in the position of ``spec``; the length of the position for one
            that acts on no output.
        base: the position of ``spec`` where every kept coordinate is 0: its buffers.
    """

    spec: Specification
    where: Tensor
    base: Tensor

    def position(self, free: Tensor) -> Tensor:
        """The position of the small model from the kept coordinates."""
        base = torch.cat([self.base.to(free), free.new_zeros(1)])
        return base.scatter(0, self.where, free)[: len(self.base)]

    def values(self, free: Tensor) -> dict[str, Tensor]:
        """The value of every site of the small model, on its support."""
        return self.spec.layout.constrained(self.position(free))

    def of_free(self, gradient: Tensor) -> Tensor:
        """The part of a gradient over the position that belongs to the kept coordinates."""
        return torch.cat([gradient, gradient.new_zeros(1)])[self.where]


def compacted(spec: Specification, kept: Tensor, position: Tensor) -> Compacted:
    """The model of ``spec`` on small networks, where ``kept`` (num_coordinates,) says which weights are not zero.

    Buffers are those of ``position``.
    """
    numbers = torch.arange(len(kept), device=kept.device)
    number_of = {site.name: part for site, part in spec.layout.parts(numbers)}
    mask_of = {site.name: part for site, part in spec.layout.parts(kept)}
    networks = []
    for module in spec.layout.modules():
        chain = linear_chain(module.module) if type(module).forward is SparseModule.forward else None
        if chain is None:
            continue
        site_of = {parameter: site.name for parameter, site in spec.layout.of_module(module).items()}
        columns = _keep_live(chain, site_of, mask_of, number_of)
        networks.append((module, _forward(chain, site_of, columns)))
    small = tuple(dataclasses.replace(site, shape=number_of[site.name].shape) for site in spec.layout.sites)
    stands_at = torch.cat([number_of[site.name].reshape(-1) for site in small])
    where = torch.full_like(numbers, len(stands_at))
    where[stands_at] = torch.arange(len(stands_at), device=kept.device)
    model = _OnSmallNetworks(spec.model, tuple(networks))
    is_buffer = spec.layout.flat({site.name: site.kind == "buffer" for site in spec.layout.sites}, False, position)
    base = torch.where(is_buffer, position, 0.0)[stands_at]
    return Compacted(dataclasses.replace(spec, model=model, layout=Layout(small)), where[kept], base)


def _keep_live(
    chain: Sequence[Layer], site_of: dict[str, str], masks: dict[str, Tensor], numbers: dict[str, Tensor]
) -> Tensor:
    """Leaves in ``numbers`` the rows and columns of live units; which inputs they read."""
    weight = masks[site_of[chain[-1].weight]]
    live = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
    for layer in reversed(chain):
        site = site_of[layer.weight]
        columns = masks[site][live].any(0)
        numbers[site] = numbers[site][live][:, columns]
        if layer.bias is not None:
            numbers[site_of[layer.bias]] = numbers[site_of[layer.bias]][live]
        live = columns
    return live.nonzero().flatten()


def _forward(chain: Sequence[Layer], site_of: dict[str, str], columns: Tensor) -> Forward:
    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        x = next(iter((*args, *kwargs.values()))).index_select(-1, columns)
        for layer in chain:
            # The values are handed out by name, as those of parameters: a site would be checked against its full shape.
            bias = None if layer.bias is None else pyro.param(site_of[layer.bias])
            x = layer.activation(functional.linear(x, pyro.param(site_of[layer.weight]), bias))
        return x

    return forward


@dataclass(frozen=True)
class _OnSmallNetworks:
    """The user's model while its networks compute by other forwards."""

    model: Callable[..., Any]
    networks: tuple[tuple[SparseModule, Forward], ...]

    def __call__(self, *data: Any) -> Any:
        with self._exchanged():
            return self.model(*data)

    @contextlib.contextmanager
    def _exchanged(self) -> Iterator[None]:
        try:
            for module, forward in self.networks:
                module.__dict__["forward"] = forward
            yield
        finally:
            for module, _ in self.networks:
                module.__dict__.pop("forward", None)
