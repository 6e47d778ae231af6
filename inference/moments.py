"""Moments of every sparse weight over the draws of a run, exact though the draws on disk hold only what they include."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.layout import Layout, named_dims

Array = np.ndarray[Any, Any]


class Moments:
    """Mean, variance and mean inclusion probability of every spike-and-slab weight of each chain, draw by draw."""

    def __init__(self, layout: Layout, like: Tensor, num_chains: int) -> None:
        self._layout = layout
        self._is_weight = layout.thresholds(like.cpu()).isfinite()
        self._counts = np.zeros(num_chains, dtype=np.int64)
        # Means, sums of squared deviations and mean inclusion probabilities: Welford's update, stable in single precision.
        self._values = torch.zeros(num_chains, 3, int(self._is_weight.sum()), dtype=like.dtype)

    def add(self, chain: int, position: Tensor) -> None:
        """One draw (coordinate,) of a chain."""
        self._counts[chain] += 1
        count, (mean, deviation, inclusion) = int(self._counts[chain]), self._values[chain]
        weights = position[self._is_weight]
        off = weights - mean
        mean += off / count
        deviation += off * (weights - mean)
        # Draws come from the host, laws are where the model is.
        laws = [(site.law.to(part), part) for site, part in self._layout.parts(position) if site.law is not None]
        inclusion += (
            torch.cat([law.inclusion_probability(part).reshape(-1) for law, part in laws]) - inclusion
        ) / count

    def settle(self, layout: Layout) -> None:
        """Takes over the final prior of a run that looks for one."""
        self._layout = layout

    def chains(self) -> list[int]:
        """Those that have a draw."""
        return np.flatnonzero(self._counts).tolist()

    def included(self, position: Tensor) -> Tensor:
        """The draw with the weights at 0 that it does not include: of inclusion probability 1/2 or less."""
        return self._layout.included(position)

    def state(self) -> dict[str, Array]:
        """What a checkpoint must hold."""
        return {"moments/counts": self._counts, "moments/values": self._values.numpy()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Takes over the chains of a state."""
        for chain in np.flatnonzero(state["moments/counts"]):
            self._counts[chain] = state["moments/counts"][chain]
            self._values[chain] = torch.from_numpy(state["moments/values"][chain])

    def datasets(self) -> dict[str, xr.Dataset]:
        """By group one variable a site, dims (chain, ...); NaN where there are too few draws."""
        counts = torch.as_tensor(self._counts)[:, None]
        mean, deviation, inclusion = self._values.unbind(1)
        flat = {
            "posterior_mean": torch.where(counts > 0, mean, torch.nan),
            "posterior_variance": torch.where(counts > 1, deviation / (counts - 1), torch.nan),
            "posterior_inclusion": torch.where(counts > 0, inclusion, torch.nan),
        }
        sites = self._layout.spike_slab_sites()
        dims = named_dims({site.name: site.shape for site in self._layout.sites})
        chain, sizes = np.arange(len(self._counts)), [site.shape.numel() for site in sites]
        found = {}
        for group, values in flat.items():
            parts = zip(sites, values.split(sizes, 1), strict=True)
            variables = {s.name: (("chain", *dims[s.name]), part.reshape(-1, *s.shape).numpy()) for s, part in parts}
            found[group] = xr.Dataset(variables, coords={"chain": chain})
        return found
