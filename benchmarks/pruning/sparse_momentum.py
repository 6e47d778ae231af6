"""Sparse Momentum (Dettmers and Zettlemoyer 2019): weights are dropped by size and regrown where momentum is large.

Every layer starts with the same share of its weights, at random. After each epoch but the last

1. each layer loses the smallest of its weights, a share p of them, which falls along a half cosine from 0.5 to 0.005;
2. what was lost is shared among the layers in proportion to the mean size of the momentum of the weights that they had;
   what a layer has no room for goes to the others;
3. in each layer those come back whose momentum is largest, from zero, or with their value if they were dropped just now.
   Momentum is that of all coordinates, whatever the mask.

As in its authors' code, a layer of more than average momentum that is nearly dense loses no larger share than it lacks.
The count is exact at every step, where theirs is corrected for rounding after the fact. An epoch has 100 steps at least:
of digits it has 12, in which no weight can grow before it is dropped again, whole filters die, and BatchNorm makes the
momentum of those explode (all accuracy was lost). Biases and BatchNorm stay and are counted.
"""

import math

import torch
from pruning.training import Fitted, Policy, Problem, Training, largest, shares, single
from torch import Tensor

FIRST_RATE, LAST_RATE = 0.5, 0.005
LEAST_STEPS = 100  # between two exchanges


def random_masks(training: Training) -> Tensor:
    """The first mask: of every layer the same share at random, biases and BatchNorm whole."""
    mask, generator = training.mask.clone(), training.generator("first mask")
    sizes = [part.stop - part.start for part in training.layers]
    for part, size, count in zip(
        training.layers, sizes, shares(training.wanted, [float(n) for n in sizes], sizes), strict=True
    ):
        mask[part] = largest(torch.rand(size, generator=generator, device=mask.device), count)
    return mask


def drop_rate(share: float) -> float:
    """Of the kept weights, where ``share`` of the run is over."""
    return LAST_RATE + (FIRST_RATE - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2


class Regrow(Policy):
    """Drops by magnitude, regrows by momentum, after each epoch."""

    def start(self, training: Training) -> None:
        training.keep_only(random_masks(training))

    def after(self, training: Training, number: int) -> None:
        problem = training.problem
        period = problem.steps_per_epoch * math.ceil(LEAST_STEPS / problem.steps_per_epoch)
        if training.number % period == 0 and training.number < problem.num_steps:
            self.move(training, drop_rate(training.share))

    @staticmethod
    def move(training: Training, rate: float) -> None:
        """One exchange, at a rate."""
        layers, mask, momentum = training.layers, training.mask.clone(), training.momentum.abs()
        means = [float(momentum[part][mask[part]].mean()) if mask[part].any() else 0.0 for part in layers]
        total = sum(means) or 1.0
        contributions = [mean / total for mean in means]
        dropped = 0
        for part, own in zip(layers, contributions, strict=True):
            kept, size = int(mask[part].sum()), part.stop - part.start
            lacking = 1 - kept / size
            own_rate = min(rate, lacking) if lacking < 0.2 and own > 1 / len(layers) else rate
            count = kept - math.ceil(own_rate * kept)
            sizes = training.weights[part].abs().masked_fill(~mask[part], -1.0)
            mask[part] = largest(sizes, count)
            dropped += kept - count
        room = [int((~mask[part]).sum()) for part in layers]
        for part, count in zip(layers, shares(dropped, contributions, room), strict=True):
            mask[part] |= largest(momentum[part].masked_fill(mask[part], -1.0), count)
        training.keep_only(mask)


def fit(problem: Problem, seed: int) -> Fitted:
    """One network."""
    return single(Training(problem, Regrow(), seed).run("sparse_momentum"), f"rate {FIRST_RATE} to {LAST_RATE}")
