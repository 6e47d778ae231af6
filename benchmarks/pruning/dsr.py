"""DSR, dynamic sparse reparameterisation (Mostafa and Wang 2019): a global threshold, and free reallocation among layers.

Every layer starts with the same share of its weights, at random. At a reallocation

1. kept weights below the threshold H are dropped in all layers, of each layer but its largest; say K of them;
2. as many grow, as zeros, at random places that were not dropped just now: :math:`G_l = K R_l / \\sum R` in layer l, with
   R_l the weights that it has left; what a layer has no room for goes to the others;
3. H is halved where K exceeds its target by more than a tenth, doubled where it falls as much short of it.

Weights outside the mask get no gradient; their momentum fades, and is not reset. H starts at 0.001; the target is 1.4 %
of the layers' weights, as the published 20,000 are of the network they were chosen for. Reallocations are, as published
for 100,000 steps, 1, 2, 4 and 8 thousandths of the run apart up to .125, .4, .7 and .95 of it. All layers take part here,
biases and BatchNorm stay and are counted; its authors keep the first and the last layer dense.
"""

import torch
from pruning.sparse_momentum import random_masks
from pruning.training import Fitted, Policy, Problem, Training, largest, shares, single

FIRST_THRESHOLD, TARGET, TOLERANCE = 1e-3, 0.014, 0.1
PERIODS = ((0.125, 1e-3), (0.4, 2e-3), (0.7, 4e-3), (0.95, 8e-3))  # up to which share of the run, how far apart


def is_due(number: int, num_steps: int) -> bool:
    """Whether weights are reallocated after a step, counted from 0."""
    period = next((every for end, every in PERIODS if number < end * num_steps), None)
    return period is not None and number > 0 and number % max(1, round(period * num_steps)) == 0


class Reallocate(Policy):
    """Drops below a threshold, regrows at random."""

    def start(self, training: Training) -> None:
        training.keep_only(random_masks(training))
        training.extra["threshold"] = torch.tensor(FIRST_THRESHOLD)

    def gradient(self, training: Training, number: int) -> None:
        training.gradient.mul_(training.mask)

    def after(self, training: Training, number: int) -> None:
        if is_due(number, training.problem.num_steps):
            self.move(training)

    @staticmethod
    def move(training: Training) -> None:
        """One reallocation."""
        layers, before, threshold = training.layers, training.mask, float(training.extra["threshold"])
        mask, sizes = before.clone(), training.weights.abs()
        for part in layers:
            own = sizes[part].masked_fill(~before[part], -1.0)
            mask[part] = before[part] & ((own >= threshold) | largest(own, 1))
        dropped = int(before.sum() - mask.sum())
        left = [float(mask[part].sum()) for part in layers]
        free = ~before
        if sum(int(free[part].sum()) for part in layers) < dropped:
            free = ~mask  # a nearly dense network has no other places
        room = [int(free[part].sum()) for part in layers]
        training.keep_only(mask.clone())
        generator = training.generator("reallocation")
        for part, count in zip(layers, shares(dropped, left, room), strict=True):
            order = torch.rand(part.stop - part.start, generator=generator, device=mask.device)
            mask[part] |= largest(order.masked_fill(~free[part], -1.0), count)
        training.keep_only(mask)
        target = TARGET * training.num_layer_weights
        factor = 0.5 if dropped > (1 + TOLERANCE) * target else 2.0 if dropped < (1 - TOLERANCE) * target else 1.0
        training.extra["threshold"] = training.extra["threshold"] * factor


def fit(problem: Problem, seed: int) -> Fitted:
    """One network."""
    training = Training(problem, Reallocate(), seed).run("dsr")
    return single(training, f"threshold {float(training.extra['threshold']):.2g}")
