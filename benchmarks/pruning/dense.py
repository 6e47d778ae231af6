"""Dense training: SGD with momentum and weight decay, every weight kept."""

from pruning.training import Fitted, Policy, Problem, Training, single


def fit(problem: Problem, seed: int) -> Fitted:
    """One network."""
    return single(trained(problem, seed))


def trained(problem: Problem, seed: int) -> Training:
    """Shared with what builds on dense networks: made once where ``problem.folder`` keeps it."""
    return Training(problem, Policy(), seed).run("dense")
