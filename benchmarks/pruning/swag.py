r"""SWAG: a normal law around the average of the last iterates of SGD (Maddox, Garipov, Izmailov, Vetrov and Wilson 2019).

The learning rate stays where it was at the first drop. From 161 of 300 epochs on, after each one, the weights
:math:`\theta_i` enter the running means of :math:`\theta` and :math:`\theta^2`, and their deviation from the mean so far
is a column of :math:`D`, of which the last K = 20 stay. A draw is

.. math::
    \theta = \bar\theta + \tfrac{1}{\sqrt 2} \Sigma_\mathrm{diag}^{1/2} z_1 + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2, \quad
    \Sigma_\mathrm{diag} = \overline{\theta^2} - \bar\theta^2,

with standard normals :math:`z_1, z_2`. BatchNorm's running statistics are made anew for each of 30 draws.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from pruning.training import Fitted, Policy, Problem, Training
from torch import Tensor, nn

BEGIN, RANK, DRAWS = (161, 300), 20, 30
STATISTICS_ROWS = 10_000  # that running statistics are made of


class Collect(Policy):
    """Running moments of the weights and their last deviations, once an epoch."""

    def start(self, training: Training) -> None:
        like = training.weights
        training.extra = {"mean": torch.zeros_like(like), "square": torch.zeros_like(like)}
        training.extra |= {"columns": like.new_zeros(0, len(like)), "count": torch.zeros(())}

    def after(self, training: Training, number: int) -> None:
        begun = BEGIN[1] * training.number > BEGIN[0] * training.problem.num_steps
        if begun and training.number % training.problem.steps_per_epoch == 0:
            self.collect(training)

    @staticmethod
    def collect(training: Training) -> None:
        extra, weights = training.extra, training.weights
        count = float(extra["count"])
        extra["mean"] = (extra["mean"] * count + weights) / (count + 1)
        extra["square"] = (extra["square"] * count + weights.square()) / (count + 1)
        extra["columns"] = torch.cat([extra["columns"], (weights - extra["mean"])[None]])[-RANK:]
        extra["count"] = extra["count"] + 1


def draw(extra: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    """(coordinate,) weights from the law."""
    mean, columns = extra["mean"], extra["columns"]
    rank = len(columns)
    variance = (extra["square"] - mean.square()).clamp(min=0)
    first = torch.randn(mean.shape, generator=generator, device=mean.device)
    second = torch.randn(rank, generator=generator, device=mean.device)
    return mean + (variance / 2).sqrt() * first + columns.T @ second / (2 * max(rank - 1, 1)) ** 0.5


@torch.no_grad()
def refresh_statistics(training: Training) -> None:
    """Running statistics of BatchNorm, those of the weights as they are: plain averages over batches."""
    net, problem = training.net, training.problem
    norms = [part for part in net.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    usual = [part.momentum for part in norms]
    for part in norms:
        part.reset_running_stats()
        part.momentum = None
    net.train()
    for number in range(min(STATISTICS_ROWS // problem.recipe.batch, problem.steps_per_epoch)):
        problem.logits(net, training.batches(number)[0])
    net.eval()
    for part, momentum in zip(norms, usual, strict=True):
        part.momentum = momentum


def fit(problem: Problem, seed: int) -> Fitted:
    """One training, and 30 draws around the average of its end."""
    changed = replace(problem, recipe=replace(problem.recipe, drops=problem.recipe.drops[:1]))
    training = Training(changed, Collect(), seed).run("swag")

    def networks() -> Iterator[nn.Module]:
        generator = training.generator("draws")
        for _ in range(DRAWS):
            training.seen.copy_(draw(training.extra, generator))
            refresh_statistics(training)
            yield training.net

    return Fitted(networks, [training], 1.0, f"{int(training.extra['count'])} iterates, {DRAWS} draws")
