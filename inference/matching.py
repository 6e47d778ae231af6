"""Chains brought to one representative: hidden units permuted and flipped in sign, the function unchanged."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import xarray as xr
from torch import Tensor, nn

from pyro_sparse.inference.layout import Layout, Site
from pyro_sparse.inference.run import Run
from pyro_sparse.inference.selection import best_chain
from pyro_sparse.inference.store import StoredDraws
from pyro_sparse.inference.structure import Layer, linear_chain
from pyro_sparse.inference.warning import warn
from pyro_sparse.models.layers import SparseModule

SWEEPS = 20  # at most; they end where nothing changes, mostly after two

Values = dict[str, Tensor]  # by site


def matched(run: Run) -> Run:
    """The same run with the hidden units of its networks in one order and sign: draws of all chains can be averaged.

    A network computes the same with its hidden units permuted and, where their activation f is odd, f(-a) = -f(a), with
    signs flipped, so that weights of different chains mean different things. Each draw is moved to where it is closest, in
    squared distance, to one representative, the last position of the best chain: one optimal assignment a hidden layer
    (``scipy.optimize.linear_sum_assignment`` on ``|A Bᵀ|``, A and B the weights into and out of the units), in sweeps over
    the layers until nothing changes. Exact for one hidden layer, the better of two local optima for more. Then

        ps.mipp(ps.matched(run)).mean("chain")

    is the inclusion probability of each weight over all chains, as far as they found the same network: chains that found
    different functions stay different. Networks that are not linear layers one after another are left as they are, with a
    warning; so, unseen, are layers of their own (``SparseLinear``) that your model puts together.

    Returns:
        A run with matched ``draws`` and ``positions``. Of a run in memory ``trace["posterior"]`` holds the matched draws;
        of one on disk each is matched when it is read (an assignment is cubic in the number of units), and ``trace`` has
        ``sample_stats`` alone, since arrays on disk hold the draws, and moments of them, as they were sampled.

    Source: weight matching of Ainsworth, Hayase and Srinivasa, Git Re-Basin (2023), section 3.2; signs are added.
    """
    matching = Matching.of(run)
    if not matching.hidden:
        return run
    positions = torch.stack([matching(position) for position in run.positions])
    groups = {"sample_stats": run.trace["sample_stats"].to_dataset()}
    draws: Tensor | StoredDraws
    if isinstance(run.draws, Tensor):
        draws = torch.stack([torch.stack([matching(draw) for draw in chain]) for chain in run.draws])
        posterior, values = run.trace["posterior"].to_dataset(), run.spec.layout.constrained(draws)
        moved = {name: old.copy(data=values[str(name)].cpu().numpy()) for name, old in posterior.items()}
        groups["posterior"] = posterior.assign(moved)
        if "buffers" in run.trace.children:  # of networks that are not matched, as they were
            groups["buffers"] = run.trace["buffers"].to_dataset()
    else:
        draws = MatchedDraws(run.draws, matching)
    trace = xr.DataTree.from_dict(groups)
    trace.attrs.update(run.trace.attrs)
    return replace(run, positions=positions, draws=draws, trace=trace)


class MatchedDraws(StoredDraws):
    """Draws on disk that are matched as they are read; has the interface of those it is made from."""

    def __init__(self, draws: StoredDraws, matching: "Matching") -> None:
        self._draws, self._matching = draws, matching
        self.shape = draws.shape

    def __getitem__(self, index: tuple[int, int]) -> Tensor:
        return self._matching(self._draws[index])

    def of_chains(self, chains: slice) -> StoredDraws:
        return MatchedDraws(self._draws.of_chains(chains), self._matching)


@dataclass(frozen=True)
class Hidden:
    """The units of one hidden layer, by the sites that hold their weights.

    Attributes:
        weight, bias: what comes in; each unit is a row.
        following: what goes out; each unit is a column.
        is_odd: whether a unit may change its sign.
        is_last: whether the outputs follow, whose order is fixed.
    """

    weight: str
    bias: str | None
    following: str
    is_odd: bool
    is_last: bool

    def similarity(self, reference: Values, values: Values, outgoing: bool) -> Tensor:
        """Inner products (place, unit) of the weights of every two units."""
        found = reference[self.weight] @ values[self.weight].T
        if self.bias is not None:
            found = found + reference[self.bias][:, None] * values[self.bias]
        return found + reference[self.following].T @ values[self.following] if outgoing else found

    def assigned(self, values: Values, similarity: Tensor) -> bool:
        """Puts the units in ``values`` where their similarities sum to most; False where they are there."""
        from scipy.optimize import linear_sum_assignment

        gains = similarity.abs() if self.is_odd else similarity
        order = torch.from_numpy(linear_sum_assignment(gains.cpu().numpy(), maximize=True)[1]).to(similarity.device)
        chosen = similarity.gather(1, order[:, None])[:, 0]
        signs = torch.where(chosen < 0, -1.0, 1.0).to(chosen) if self.is_odd else torch.ones_like(chosen)
        gain, present = (signs * chosen).sum() - similarity.diagonal().sum(), similarity.diagonal().abs().sum()
        if not bool(gain > 1e-5 * present):  # equal units could change places for ever: rounding is no gain
            return False
        values[self.weight] = values[self.weight][order] * signs[:, None]
        if self.bias is not None:
            values[self.bias] = values[self.bias][order] * signs
        values[self.following] = values[self.following][:, order] * signs
        return True


@dataclass(frozen=True)
class Matching:
    """Moves the hidden units of a position to those of a representative: ``matching(position)``."""

    layout: Layout
    hidden: tuple[Hidden, ...]
    reference: Values

    @classmethod
    def of(cls, run: Run) -> "Matching":
        """To the last position of the best chain of a run; of the networks whose units can be matched."""
        layout = run.spec.layout
        hidden = [one for module in layout.modules() for one in _hidden_layers(layout.of_module(module), module)]
        return cls(layout, tuple(hidden), _values(layout, run.positions[best_chain(run)]))

    def __call__(self, position: Tensor) -> Tensor:
        """The closer of what two ways find: from the inputs on, whose order is fixed, and from how the units are.

        One layer alone, between inputs and outputs, is exact at once.
        """
        if all(hidden.is_last for hidden in self.hidden):
            return self._settled(position, num_sweeps=0)[1]
        ways = [self._settled(position, SWEEPS, from_inputs) for from_inputs in (True, False)]
        return min(ways, key=lambda way: way[0])[1]

    def _settled(self, position: Tensor, num_sweeps: int, from_inputs: bool = True) -> tuple[float, Tensor]:
        """The position after sweeps until nothing changes, and its squared distance to the representative in front."""
        values = _values(self.layout, position)
        if from_inputs:
            self._sweep(values, first=True)
        for _ in range(num_sweeps):
            if not self._sweep(values):
                break
        distance = sum(float((values[name] - part).square().sum()) for name, part in self.reference.items())
        return distance, torch.cat([values[site.name].reshape(-1) for site in self.layout.sites])

    def _sweep(self, values: Values, first: bool = False) -> bool:
        """Each layer once, the ``first`` time by what is in place before it; whether anything was moved."""
        moved = False
        for hidden in self.hidden:
            moved |= hidden.assigned(values, hidden.similarity(self.reference, values, hidden.is_last or not first))
        return moved


def _values(layout: Layout, position: Tensor) -> Values:
    return {site.name: part for site, part in layout.parts(position)}


def _hidden_layers(sites: dict[str, Site], module: SparseModule) -> Iterator[Hidden]:
    """Those of a network whose units can change places."""
    layers = linear_chain(module.module)
    if layers is None:
        reason = "it is not linear layers and elementwise maps one after another"
    elif not all(name in sites and sites[name].transform is None for layer in layers for name in _names(layer)):
        reason = "some of its weights are not sampled"
    elif not all(_exchangeable(sites, *pair) for pair in itertools.pairwise(layers)):
        reason = "the prior tells its units apart"
    else:
        for layer, following in itertools.pairwise(layers):
            bias = None if layer.bias is None else sites[layer.bias].name
            weight, after = sites[layer.weight].name, sites[following.weight].name
            yield Hidden(weight, bias, after, _is_odd(layer.activation), following is layers[-1])
        return
    warn(f"hidden units of the network of site '{next(iter(sites.values())).name}' are not matched, as {reason}")


def _names(layer: Layer) -> list[str]:
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]


def _exchangeable(sites: dict[str, Site], layer: Layer, following: Layer) -> bool:
    """Whether all units of a layer have one prior."""
    parts = [(sites[name].law, 0) for name in _names(layer)] + [(sites[following.weight].law, 1)]
    arguments = [
        (getattr(law, name).expand(law.batch_shape), axis)
        for law, axis in parts
        if law is not None
        for name in law.arg_constraints
    ]
    return all(bool((value == value.narrow(axis, 0, 1)).all()) for value, axis in arguments)


def _is_odd(activation: nn.Module) -> bool:
    """Whether f(-a) = -f(a)."""
    if isinstance(activation, nn.Hardtanh) and not isinstance(activation, nn.ReLU6):
        return bool(activation.min_val == -activation.max_val)
    if isinstance(activation, nn.Sequential):
        return all(_is_odd(part) for part in activation)
    return isinstance(activation, (nn.Tanh, nn.Identity, nn.Dropout))


__all__ = ["MatchedDraws", "Matching", "matched"]
