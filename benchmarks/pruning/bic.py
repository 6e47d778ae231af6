r"""BNN_BIC: modes of the posterior under a fixed mixture prior, thresholded and refitted, the best by BIC.

Each of several runs, from a start of its own,

1. trains with the slab alone, :math:`\sigma_1^2 = 1 / (5 \cdot 10^{-4} N)`, which is the usual weight decay, for half of
   its steps;
2. then with the mixture prior, to a mode of the posterior: the gradient of :math:`-\frac1N \log \pi` is added;
3. then keeps the largest weights of all parameters, as many as are wanted, and refits them with the slab alone for the
   last thirtieth of its steps.

The slab has probability :math:`10^{-6}`, and the spike is as wide as makes the share of the weights above the inclusion
threshold the wanted one when it comes in, unless a step would come near the bound of stability; its authors chose widths
for each network and share. The run of the smallest :math:`\mathrm{BIC} = -2 \log p(D \mid \hat\beta, \hat\gamma) +
|\hat\gamma| \log N` is the result. As all keep as many weights, it is that of the largest likelihood.

Source: Sun, Song and Liang (2021), Consistent sparse deep learning, of whose ten runs these are three.
"""

import math
from dataclasses import replace

import torch
from pruning.training import Fitted, Policy, Problem, Training, largest, single
from torch import nn

import pyro_sparse as ps

RUNS, APART = 3, 1_000  # the paper: ten runs; their seeds are so far apart
SLAB_PROB, BEGIN, REFIT = 1e-6, 0.5, 1 / 30
STABLE = 0.25  # of the bound on rate / (N spike variance)


def spike_of(threshold: float, slab_scale: float) -> float:
    """The scale of the spike whose inclusion threshold is the given one, by bisection; at most a half of the slab's."""
    low, high = 1e-6 * slab_scale, slab_scale / 2
    for _ in range(60):
        middle = math.sqrt(low * high)
        below = float(ps.SpikeSlab(SLAB_PROB, middle, slab_scale).inclusion_threshold) < threshold
        low, high = (middle, high) if below else (low, middle)
    return low


class Mode(Policy):
    """The slope of the prior, added to the gradient; the mask before the refit.

    Attributes:
        decay: the weight decay that the slab stands for.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def start(self, training: Training) -> None:
        training.extra["spike_scale"] = torch.zeros(())

    def gradient(self, training: Training, number: int) -> None:
        problem, weights = training.problem, training.weights
        num_rows, num_steps = len(problem.train[0]), problem.num_steps
        slab = (self.decay * num_rows) ** -0.5
        if number == round(BEGIN * num_steps):
            quantile = float(weights.abs().sort().values[-self.wanted(training)])
            bound = 2 * (1 + problem.recipe.momentum) * STABLE
            least = (problem.recipe.rate_at(BEGIN) / (num_rows * bound)) ** 0.5
            training.extra["spike_scale"].fill_(max(spike_of(quantile, slab), least))
        slope = weights / slab**2
        if round(BEGIN * num_steps) <= number < num_steps - self.refit_steps(training):
            law = ps.SpikeSlab(SLAB_PROB, float(training.extra["spike_scale"]), slab, validate_args=False)
            included = law.inclusion_probability(weights)
            slope = weights * ((1 - included) / law.spike_scale**2 + included / slab**2)
        training.gradient.add_(slope, alpha=1 / num_rows)

    def after(self, training: Training, number: int) -> None:
        if training.number == training.problem.num_steps - self.refit_steps(training):
            training.keep_only(largest(training.weights.abs(), self.wanted(training)))

    @staticmethod
    def wanted(training: Training) -> int:
        """Of all parameters, which all have the prior."""
        return round(training.problem.keep * len(training.mask))

    @staticmethod
    def refit_steps(training: Training) -> int:
        return max(1, round(REFIT * training.problem.num_steps))


@torch.no_grad()
def bic(training: Training, rows: int = 1_000) -> float:
    """Of the network as it is, on the training rows."""
    images, labels = training.problem.train
    loss = sum(
        float(nn.functional.cross_entropy(training.problem.logits(training.net, some), of, reduction="sum"))
        for some, of in zip(images.split(rows), labels.split(rows), strict=True)
    )
    return 2 * loss + int(training.mask.sum()) * math.log(len(labels))


def fit(problem: Problem, seed: int) -> Fitted:
    """The best of the runs."""
    changed = replace(problem, recipe=replace(problem.recipe, weight_decay=0.0))
    policy = Mode(problem.recipe.weight_decay)
    trainings = [Training(changed, policy, seed + APART * number).run("bic") for number in range(RUNS)]
    scores = [bic(training) for training in trainings]
    best = trainings[scores.index(min(scores))]
    found = single(best, f"{RUNS} runs, BIC {', '.join(f'{score:.0f}' for score in scores)}")
    return replace(found, trainings=trainings)
