"""A deep ensemble: dense networks from different starts and orders of batches, their probabilities averaged.

Lakshminarayanan, Pritzel and Blundell (2017), without adversarial training. Five networks take five trainings and five
times the weights, which the share kept says: 5.
"""

from collections.abc import Iterator

from pruning.dense import trained
from pruning.training import Fitted, Problem
from torch import nn

MEMBERS, APART = 5, 1_000  # seeds of members are so far apart; the first is the dense network of the seed


def fit(problem: Problem, seed: int) -> Fitted:
    """Five networks."""
    trainings = [trained(problem, seed + APART * member) for member in range(MEMBERS)]

    def networks() -> Iterator[nn.Module]:
        return (training.net for training in trainings)

    return Fitted(networks, trainings, float(MEMBERS), f"{MEMBERS} dense networks")
