"""BNN_Evidence: ten modes of the posterior from ten starts, the best by evidence (Sun, Song and Liang 2021; section 3).

Each run trains briefly without the prior, then maximises the log-posterior under one fixed mixture prior (no annealing,
temperature 0), drops the weights under the prior's threshold and refits the others. The width of the fixed spike, between the
final and the initial one of our annealing, is that whose first run predicts the first half of the validation rows best.
"""

import math

import numpy as np
import torch
from common import PROB, Array, Data, Fitted, mean_square
from rivals.networks import name_of
from torch import Tensor

import pyro_sparse as ps

HIDDEN = (20, 10)
NUM_RUNS, TRAIN_STEPS, STEPS = 10, 500, 4_000
WIDTHS = (0.4, 0.55, 0.7, 0.85)  # 0 is the final spike of our annealing, 1 the initial, on the log scale
ITERATIONS = 50  # of the refits that are compared; the best one is then refitted to the end
MAX_WEIGHTS = 1_000  # kept weights up to which the evidence is computed; above, BIC


def fit(data: Data, seed: int, effort: float) -> Fitted:
    """The best of the runs."""
    x, y = data.train.x, data.train.y
    centre, spread, level, scale = x.mean(0), x.std(0), y.mean(), y.std()

    def tensor(x: Array) -> Tensor:
        return torch.as_tensor((x - centre) / spread, dtype=torch.float32)

    rows = (tensor(x), torch.as_tensor((y - level) / scale, dtype=torch.float32))
    sizes = [x.shape[1], *HIDDEN, 1]
    num_tuned = len(data.validation.y) // 2
    tuning = data.validation[:num_tuned]

    def error(run: ps.Run) -> float:
        mean = ps.predict(refitted(run), tensor(tuning.x))["mean"].values
        return mean_square(mean * scale + level - tuning.y)

    first = {width: one_run(rows, sizes, NUM_RUNS * seed, effort, width) for width in WIDTHS}
    width = min(WIDTHS, key=lambda width: error(first[width]))
    others = [one_run(rows, sizes, NUM_RUNS * seed + number, effort, width) for number in range(1, NUM_RUNS)]
    runs = [first[width], *others]
    fits = [refitted(run) for run in runs]
    use_bic = max(found.structure.num_kept for found in fits) > MAX_WEIGHTS
    scores = [-0.5 * bic(found) if use_bic else log_evidence(found) for found in fits]
    chosen = int(np.argmax(scores))
    best = ps.refit(runs[chosen], fits[chosen].structure)

    def table(x: Array) -> dict[str, Array]:
        found = ps.predict(best, tensor(x), PROB)
        return {name: found[name].values * scale + level for name in ("mean", "lower", "upper")}

    def interval(x: Array) -> tuple[Array, Array]:
        found = table(x)
        return found["lower"], found["upper"]

    counts = [len(found.structure.input_indices) for found in fits]
    note = f"inputs a run {counts}, {counts[chosen]} in the best by {'BIC' if use_bic else 'evidence'}; "
    note += f"spike {width} of {WIDTHS} of the way; intervals: Bernstein-von Mises"
    return Fitted(lambda x: table(x)["mean"], best.structure.input_indices, interval, name_of(sizes), note, num_tuned)


def refitted(run: ps.Run) -> ps.Fit:
    """Far enough to be compared."""
    return ps.refit(run, ps.select(run).with_biases(), max_iterations=ITERATIONS)


def one_run(rows: tuple[Tensor, Tensor], sizes: list[int], seed: int, effort: float, width: float) -> ps.Run:
    """A mode of the posterior."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        plain = ps.SparseNet(sizes)
    laws = ps.default_prior(plain.module, len(rows[1]))
    fixed = {name: ps.SpikeSlab(law.slab_prob, _spike(law, width), law.slab_scale) for name, law in laws.items()}
    model = ps.normal_regression(ps.sparsify(plain.module, fixed), len(rows[1]))
    steps = [max(1, int(number * effort)) for number in (TRAIN_STEPS, STEPS)]
    schedule = ps.PriorAnnealing(steps[0], 0, 0, steps[1], learning_rate=4e-3, temperature=0.0)
    batch = min(500, len(rows[1]))
    return ps.anneal(model, rows, schedule, batch_size=batch, num_draws=1, seed=seed, progress=False)


def _spike(law: ps.SpikeSlab, width: float) -> Tensor:
    return law.spike_scale ** (1 - width) * law.initial_spike_scale**width


def log_evidence(fit: ps.Fit) -> float:
    """Laplace approximation of the log of the likelihood integrated over the kept weights under a standard normal slab."""
    covariance = fit.covariance().values
    variances = np.linalg.eigvalsh(covariance)
    # Directions of which the data say nothing keep the slab's variance, 1 in the default prior.
    variances = np.where(variances > 1e-12 * variances.max(initial=0.0), variances, 1.0)
    weights = torch.cat([value[fit.structure.masks[name]] for name, value in weight_values(fit)])
    log_prior = -0.5 * float(weights.square().sum()) - 0.5 * len(weights) * math.log(2 * math.pi)
    integral = 0.5 * len(variances) * math.log(2 * math.pi) + 0.5 * float(np.log(variances).sum())
    return -fit.loss * len(fit.data[0]) + log_prior + integral


def bic(fit: ps.Fit) -> float:
    """Minus twice the log-likelihood plus log n for each kept weight."""
    num_rows = len(fit.data[0])
    return 2 * fit.loss * num_rows + math.log(num_rows) * fit.structure.num_kept


def weight_values(fit: ps.Fit) -> list[tuple[str, Tensor]]:
    """The refitted values of the spike-and-slab sites."""
    return [(name, fit.values[name]) for name in fit.structure.masks]
