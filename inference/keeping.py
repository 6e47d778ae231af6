r"""A wanted share of weights: ``anneal(..., keep=0.1)`` moves the spike so that the prior includes as many.

The share that the prior includes at a position is that of the weights beyond the inclusion threshold, which grows with the
scale of the spike. While the prior is raised (:math:`s` from 0 to 1 over the power phase) the spike is as wide as makes this
share :math:`k + (1 - k)(1 - s)^3`, the cubic path of Zhu and Gupta (2017): the weights below are drawn to zero, the others
are free. While the spike is narrowed the threshold is lowered from the smallest weight included into the gap between those
included and those excluded: to where fewest weights are near it, on a logarithmic scale, among the thresholds that exceed
the share by no more than 0.2 points (later some weights are lost rather than won); the variance of the spike by no more
than ten times (as in section A.6 of the paper). At no step is it so narrow that the step would be near the bound of
stability. From then on the prior is fixed: it is the final one of the run, its draws, ``mipp`` and ``select``.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.layout import Layout
from pyro_sparse.inference.schedule import PriorAnnealing
from pyro_sparse.models.spike_slab import SpikeSlab

SLAB_DECAY = 5e-4  # the weight decay that the slab stands for: 1 / (N slab_scale²)
LOOKS = 200  # in the phases that move the spike
LEAST_PROB = 1e-9
STABLE = 0.25  # of the bound of PriorAnnealing.check_stability
NARROWING = 10.0  # of the spike's variance, in the spike phase
SLACK = 0.002  # of all weights, by which the share may be exceeded for a threshold that few weights are near
GRID, WINDOW = 48, 8
FINEST = 8.0  # the smallest spike looked for is 10^-8 of the way from the end


def check_keep(keep: float, schedule: PriorAnnealing, num_chains: int) -> None:
    """Whether a share can be aimed at.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    if not 0 < keep < 1:
        raise ValueError(f"keep must lie in (0, 1), the share of weights to keep, got {keep}")
    if num_chains > 1:
        raise ValueError(f"num_chains must be 1 with keep, as each run has its own final prior, got {num_chains}")
    held = schedule.cool_steps + schedule.sample_steps
    for phase, steps in (("power_steps", schedule.power_steps), ("cool_steps + sample_steps", held)):
        if not steps:
            raise ValueError(f"{phase} must be >= 1 with keep, to reach the share and then hold it, got 0")


def check_moves(layout: Layout) -> None:
    """Whether a spike can be moved.

    Raises:
        ValueError: of a model without one, or whose spikes all stay where they are.
    """
    if not layout.spike_slab_sites():
        raise ValueError("keep must be None for a model without a spike-and-slab site, got a number")
    laws = [site.law for site in layout.sites if site.law is not None]
    if not any(bool((law.initial_spike_scale > law.spike_scale).any()) for law in laws):
        raise ValueError(
            "initial_spike_scale must exceed spike_scale with keep, which moves the spike between them, got them equal at "
            "every site: leave the prior unset"
        )


def law_to_keep(keep: float, schedule: PriorAnnealing, num_data: int, scale: float) -> SpikeSlab:
    r"""The prior of weights whose share is given, where none was: one for all weights, as in the paper's image networks.

    The slab pulls as the usual weight decay of such networks, 5e-4: :math:`\sigma_1^2 = 1 / (5 \cdot 10^{-4} N)`, the
    paper's 0.04 at 50,000 rows. The spike moves between a half and a 500th of its scale. A weight comes from the slab with the
    probability that it is to be kept with, unless the power phase is too short for such a spike to draw to zero what is
    below its threshold t: that takes a scale of no more than :math:`\sqrt{\epsilon T / (40 \alpha N)}`, with T steps at
    learning rate :math:`\epsilon`. The probability is then so small that it is one, but at least 1e-9, the paper's.

    Args:
        scale: of the weights about the threshold, t.
    """
    slab = (SLAB_DECAY * num_data) ** -0.5
    power = schedule.at(schedule.train_steps + schedule.power_steps - 1)
    bites = math.sqrt(power.learning_rate * schedule.power_steps / (40 * power.friction * num_data))
    log_odds = min(0.5 * (scale / bites) ** 2, 100.0)  # of the spike at 0, which are those of the slab at the threshold
    slab_prob = 1 / (1 + math.exp(log_odds) * min(bites / slab, 1.0))
    return SpikeSlab(min(max(slab_prob, LEAST_PROB), keep), 0.002 * slab, slab, 0.5 * slab)


def _scale(layout: Layout) -> float:
    """Root mean square of weights that start from a variance of one over their number of inputs."""
    shapes = [site.shape for site in layout.spike_slab_sites() if len(site.shape) > 1]
    outputs, sizes = sum(shape[0] for shape in shapes), sum(shape.numel() for shape in shapes)
    return math.sqrt(outputs / sizes) if shapes else 1.0


def with_laws(spec: Specification, laws: Mapping[str, SpikeSlab]) -> Specification:
    """The same with other priors at some sites, whatever its model says of them."""
    sites = [
        dataclasses.replace(s, law=laws[s.name].expand(s.shape)) if s.name in laws else s for s in spec.layout.sites
    ]
    return dataclasses.replace(spec, layout=Layout(tuple(sites)), priors={**spec.priors, **laws})


def prepared(spec: Specification, keep: float, schedule: PriorAnnealing) -> Specification:
    """The model with the prior that a share is aimed at with, where it was unset."""
    law = law_to_keep(keep, schedule, spec.num_data, _scale(spec.layout))
    return with_laws(spec, {name: law.to(old.slab_scale) for name, old in spec.priors.items()})


def settled(spec: Specification, progress: float) -> Specification:
    """The model whose final spike is that at ``progress`` on the way from its initial to its narrowest one."""
    laws = {}
    for site in spec.layout.spike_slab_sites():
        assert site.law is not None
        spike = site.law.at(progress).current_spike_scale
        laws[site.name] = SpikeSlab(
            site.law.slab_prob, spike, site.law.slab_scale, site.law.initial_spike_scale, validate_args=False
        )
    return with_laws(spec, laws)


class Keeping:
    """Where the spike must be at a step for a share of weights: ``keeping.progress(number, position)``."""

    def __init__(self, keep: float, layout: Layout, schedule: PriorAnnealing, num_data: int) -> None:
        self._keep, self._layout, self._schedule, self._num_data = keep, layout, schedule, num_data
        self._begin, self._power, self._spike = schedule.train_steps, schedule.power_steps, schedule.spike_steps
        self.end, self._num_steps = self._begin + self._power + self._spike, schedule.num_steps
        self._period = max(1, (self._power + self._spike) // LOOKS)
        self._num_weights = sum(site.shape.numel() for site in layout.spike_slab_sites())

    def is_due(self, number: int) -> bool:
        """Whether the spike moves before a step; from ``end`` on it is fixed."""
        since = number - self._begin
        return number == self.end or (since >= 0 and number < self.end and since % self._period == 0)

    def until(self, number: int) -> int:
        """The step before which it moves next, after one before which it did."""
        return self._num_steps if number >= self.end else min(number + self._period, self.end)

    def progress(self, number: int, position: Tensor) -> float:
        """In [0, 1], from the initial spike to the narrowest."""
        since = number - self._begin
        share = self._keep + (1 - self._keep) * (1 - min(since / self._power, 1.0)) ** 3
        wanted = round(share * self._num_weights)
        weights = _by_law(self._layout, position.detach().abs())
        # Of spikes of several scales the one that moves most: no other narrows more.
        law = max((law for law, _ in weights), key=lambda law: _variance(law, 0.0) / _variance(law, 1.0))
        _, widest = _where_it_ends(lambda u: _num_included(weights, u) < wanted)
        variance = _variance(law, widest)
        if since >= self._power:
            done = min((since - self._power) / max(self._spike, 1), 1.0) if number < self.end else 1.0
            variance = max(variance * NARROWING**-done, self._in_gap(weights, law, wanted))
        start, end = _variance(law, 0.0), _variance(law, 1.0)
        variance = max(variance, self._least_stable(number))
        return float(min(max((start - variance) / (start - end), 0.0), 1.0))

    def _in_gap(self, weights: list[tuple[SpikeSlab, Tensor]], law: SpikeSlab, wanted: int) -> float:
        """The variance in the middle of the emptiest part of where nearly as many weights as wanted are included."""
        slack = round(SLACK * self._num_weights)
        _, first = _where_it_ends(lambda u: _num_included(weights, u) < wanted)
        last, _ = _where_it_ends(lambda u: _num_included(weights, u) <= wanted + slack)
        start, end, wide, narrow = (_variance(law, u) for u in (0.0, 1.0, first, last))
        if not narrow < wide:
            return wide
        variances = [wide * float((narrow / wide) ** (place / GRID)) for place in range(GRID + 1)]
        counts = [_num_included(weights, (start - variance) / (start - end)) for variance in variances]
        within = [counts[place + WINDOW] - counts[place] for place in range(GRID - WINDOW + 1)]
        emptiest = [place for place, count in enumerate(within) if count == min(within)]
        return variances[emptiest[len(emptiest) // 2] + WINDOW // 2]

    def _least_stable(self, number: int) -> float:
        """The variance of the narrowest spike for the steps until it moves next; of the last move, to the end."""
        now, last = self._schedule.at(number), self._schedule.at(self.until(number) - 1)
        bound = 2 * (2 - now.friction)
        return now.learning_rate * last.prior_power / self._num_data / (STABLE * bound)


def _by_law(layout: Layout, sizes: Tensor) -> list[tuple[SpikeSlab, Tensor]]:
    """The sizes of the weights of each law: all that share one together, as each costs the same few operations."""
    found: dict[Any, tuple[SpikeSlab, list[Tensor]]] = {}
    for site, part in layout.parts(sizes):
        if site.law is not None:
            own = [getattr(site.law, name) for name in site.law.arg_constraints]
            key = tuple(map(float, own)) if all(value.numel() == 1 for value in own) else site.name
            found.setdefault(key, (site.law, []))[1].append(part)
    return [
        (law, parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts]))
        for law, parts in found.values()
    ]


def _num_included(weights: list[tuple[SpikeSlab, Tensor]], progress: float) -> int:
    counts = [(sizes > law.at(progress).inclusion_threshold).sum() for law, sizes in weights]
    return int(torch.stack(counts).sum())


def _variance(law: SpikeSlab, progress: float) -> float:
    return float(law.at(progress).current_spike_scale.square().mean())


def _where_it_ends(holds: Callable[[float], bool]) -> tuple[float, float]:
    """The last progress at which something holds and the first at which it does not, that holds up to somewhere in [0, 1].

    Spikes are looked for on a logarithmic scale of what is left of the way.
    """
    if holds(1.0):
        return 1.0, 1.0
    if not holds(0.0):
        return 0.0, 0.0
    low, high = 0.0, FINEST
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(1 - 10**-middle) else (low, middle)
    return 1 - 10**-low, 1 - 10**-high
