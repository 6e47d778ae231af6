"""What the sampler's answers are worth: bias, effective draws and path averages where the posterior is known.

    python benchmarks/validity.py                              all that is missing, about a quarter of an hour on one core
    python benchmarks/validity.py linear --batches 50          some of the runs
    python benchmarks/validity.py --table                      benchmarks/results/validity.md and .png

``mean``: ten means of normal responses, ``linear``: linear regression on ten correlated inputs of variance 1, both with a
N(0, 1) prior and noise of variance 1, whose posteriors are exact; ``logistic``: logistic regression on the same inputs,
against a long run of NUTS. 1,000 rows. SGHMC (friction 0.1) and SGLD (friction 1) are ``ps.anneal`` with a sampling phase
alone. Every sampler has 4 chains of 4,000 gradients of all rows each, a batch of m rows counted as m / 1,000, start and
adaptation included; SGHMC and SGLD leave out the first fifth of their 3,989 draws.

``paths``: averages along the paths of 256 chains for the posterior of one mean, with constant learning rates as in theorem 3.1
of the paper and with one that falls like t^(-1/3), each value weighed by it: the mean squared error of first-order samplers
then falls like t^(-2/3), the best rate of Chen, Ding and Carin (2015), to whom the paper refers for falling rates.
`ps.PriorAnnealing` lowers a learning rate by factors of ten only, so the steps are those of ``inference/sghmc.py`` without the
loop, and with independent batches.
"""

import argparse
import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from common import RESULTS, Array, Row, append_row, is_done, read_rows, seeds
from pyro.infer import MCMC, NUTS
from pyro.infer.mcmc.util import initialize_model
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor

import pyro_sparse as ps
from pyro_sparse.inference import sghmc

OUTPUT = RESULTS / "validity.jsonl"
MODELS = ("mean", "linear", "logistic")
NUM_ROWS, NUM_WEIGHTS, NUM_CHAINS = 1_000, 10, 4
BUDGET = 4_000  # full gradients of a chain
NUM_DRAWS = 3_989  # of a chain; a prime, so that they fall on all steps of an epoch
NUM_REFERENCE = 12_000  # draws of four chains
FRICTIONS = {"SGHMC": 0.1, "SGLD": 1.0}
RATES = (0.1, 0.03, 0.01)  # learning rate over friction, so that both samplers move about as fast
BATCHES = (NUM_ROWS, 200, 50)


@dataclass(frozen=True)
class Problem:
    """A Pyro model of one site "w" with its data, and the gradient of each row's loss at weights, (rows, weights)."""

    model: Callable[..., Any]
    data: tuple[Tensor, ...]
    gradients: Callable[[Array], Array]
    curvature: Callable[[Array], Array]  # of the potential at weights, (weights, weights)


def _weights() -> Tensor:
    return pyro.sample("w", dist.Normal(torch.zeros(NUM_WEIGHTS), 1.0).to_event(1))


def _mean(y: Tensor) -> None:
    w = _weights()
    with pyro.plate("data", NUM_ROWS, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=y)


def _linear(x: Tensor, y: Tensor) -> None:
    w = _weights()
    with pyro.plate("data", NUM_ROWS, subsample_size=len(y)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def _logistic(x: Tensor, y: Tensor) -> None:
    w = _weights()
    with pyro.plate("data", NUM_ROWS, subsample_size=len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def problem(name: str, seed: int) -> Problem:
    """One of the three, with data of a seed."""
    rng = np.random.RandomState(seed)
    w = np.linspace(-1, 1, NUM_WEIGHTS)
    x = (rng.standard_normal((NUM_ROWS, 1)) + rng.standard_normal((NUM_ROWS, NUM_WEIGHTS)) * 3**0.5) / 2
    noise, uniform = rng.standard_normal((NUM_ROWS, NUM_WEIGHTS)), rng.random_sample(NUM_ROWS)
    one = np.eye(NUM_WEIGHTS)

    def tensors(*arrays: Array) -> tuple[Tensor, ...]:
        return tuple(torch.as_tensor(array, dtype=torch.float32) for array in arrays)

    def prob(w: Array) -> Array:
        return np.asarray(1 / (1 + np.exp(-x @ w)))

    if name == "mean":
        y = w + noise
        return Problem(_mean, tensors(y), lambda w: w - y, lambda w: (NUM_ROWS + 1) * one)
    if name == "linear":
        y = x @ w + noise[:, 0]
        return Problem(_linear, tensors(x, y), lambda w: x * (x @ w - y)[:, None], lambda w: x.T @ x + one)
    y = (uniform < prob(w)).astype(float)

    def curvature(w: Array) -> Array:
        return np.asarray((x.T * prob(w) * (1 - prob(w))) @ x + one)

    return Problem(_logistic, tensors(x, y), lambda w: x * (prob(w) - y)[:, None], curvature)


def posterior(name: str, given: Problem, seed: int, effort: float, output: Path) -> tuple[Array, Array]:
    """Mean and covariance: exact, as a Newton step is where the potential is quadratic, or of a long run of NUTS."""
    if name != "logistic":
        w, precision = np.zeros(NUM_WEIGHTS), given.curvature(np.zeros(NUM_WEIGHTS))
        covariance = np.linalg.inv(precision)
        return w - covariance @ (given.gradients(w).sum(0) + w), covariance
    key = {"kind": "reference", "model": name, "seed": seed, "effort": effort}
    if not is_done(output, key):
        chains = [
            nuts(given, seed, -1 - chain, math.inf, int(NUM_REFERENCE / 4 * effort), effort)[0] for chain in range(4)
        ]
        draws = np.stack(chains)
        found = {"mean": draws.mean((0, 1)).tolist(), "covariance": np.cov(np.concatenate(draws).T).tolist()}
        append_row(
            output, key | found | {"num_draws": draws.shape[0] * draws.shape[1], "ess": effective(draws)}, "arviz"
        )
    row = next(row for row in read_rows(output) if key.items() <= row.items())
    return np.array(row["mean"]), np.array(row["covariance"])


class _SpentError(Exception):
    """The budget of gradients is used up."""


def nuts(given: Problem, seed: int, chain: int, budget: float, num_draws: int, effort: float) -> tuple[Array, int]:
    """Draws (draw, weight) of Pyro's NUTS and the gradients that it took, adaptation included."""
    draws: list[Array] = []
    count = 0
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyro.set_rng_seed(1_000 * seed + chain + 500)
        start, potential, _, _ = initialize_model(given.model, given.data, jit_compile=True, skip_jit_warnings=True)

        def counted(values: dict[str, Tensor]) -> Tensor:
            nonlocal count
            count += 1
            return potential(values)

        def keep(kernel: Any, values: dict[str, Tensor], stage: str, number: int) -> None:
            if stage.startswith("Sample"):
                draws.append(values["w"].detach().double().numpy().copy())
            if count >= budget and len(draws) >= 4:  # which ArviZ asks for
                raise _SpentError

        kernel = NUTS(potential_fn=counted)
        sampler = MCMC(
            *(kernel, num_draws, max(10, int(200 * effort))), initial_params=start, disable_progbar=True, hook_fn=keep
        )
        with contextlib.suppress(_SpentError):
            sampler.run()
    return np.stack(draws), count


def effective(draws: Array) -> float:
    """Effective number of draws (chain, draw, weight), all chains together, of the weight that has fewest."""
    import arviz as az

    return float(az.ess(az.convert_to_dataset({"w": draws}))["w"].min())


def errors(draws: Array, mean: Array, covariance: Array) -> Row:
    """Bias of draws (chain, draw, weight) against the posterior, with standard errors from the spread of chains.

    ``mean_bias``: of the mean, in posterior standard deviations, root mean square over weights; ``mean_noise``: what it would
    be without bias. ``sd_bias``: of the standard deviation, as a share of it. ``excess``: mean of (w - mean)' covariance⁻¹
    (w - mean) / weights, less one: the temperature beyond 1.
    """
    root = math.sqrt(len(draws))
    centred = draws - mean
    shift = centred.mean(1) / np.sqrt(np.diag(covariance))
    ratio = np.square(centred).mean(1) / np.diag(covariance)  # about the true mean: not too small for short chains
    wide = np.sqrt(ratio.mean(0))
    excess = np.einsum("cdi,ij,cdj->c", centred, np.linalg.inv(covariance), centred) / centred[0].size - 1
    return {
        "mean_bias": float(np.sqrt(np.square(shift.mean(0)).mean())),
        "mean_noise": float(np.sqrt(shift.var(0, ddof=1).mean()) / root),
        "sd_bias": float(wide.mean() - 1),
        "sd_error": float((ratio / (2 * wide)).mean(1).std(ddof=1) / root),
        "excess": float(excess.mean()),
        "excess_error": float(excess.std(ddof=1) / root),
    }


def predicted(curvature: Array, noise: Array, learning_rate: float, friction: float, batch_size: int) -> Row:
    """The excess of :func:`errors` in theory, for a quadratic potential and row gradients of covariance ``noise``.

    ``heat``: learning_rate N Var(g) / (2 friction m), independent batches and a small learning rate. ``law``: of the chain as
    it is, learning rate and all, whose batches are the parts of a permutation of the rows; ``kinetic_law``: that of the
    momenta, (1 - friction / 2) mean(momentum²) N / learning_rate - 1.
    """
    curvatures, basis = np.linalg.eigh(curvature)
    variances = np.diag(basis.T @ noise @ basis)
    settings = (learning_rate, friction, batch_size)
    laws = np.stack([stationary(k, v, *settings) for k, v in zip(curvatures, variances, strict=True)])
    heat = learning_rate * variances.mean() * NUM_ROWS / (2 * friction * batch_size)
    return {
        "heat": 0.0 if batch_size == NUM_ROWS else float(heat),
        "law": float((curvatures * laws[:, 0, 0]).mean() - 1),
        "kinetic_law": float((1 - friction / 2) * laws[:, 1, 1].mean() * NUM_ROWS / learning_rate - 1),
    }


def stationary(curvature: float, variance: float, learning_rate: float, friction: float, batch_size: int) -> Array:
    """Covariance of (position, momentum), (2, 2), in a quadratic potential, averaged over the steps of an epoch.

    In an epoch of K batches the errors of the mean gradient have covariance variance / m (identity - 1 / K): they add up to 0.
    """
    pull = learning_rate * curvature / NUM_ROWS
    drift = np.array([[1 - pull, 1 - friction], [-pull, 1 - friction]])
    thermal = solve_discrete_lyapunov(drift, np.full((2, 2), 2 * friction * learning_rate / NUM_ROWS))
    num_batches = NUM_ROWS // batch_size
    kick, power, kicks, total = np.full(2, learning_rate * math.sqrt(variance / batch_size)), np.eye(2), 0.0, 0.0
    steps = []  # of an epoch: what is left of its start, and what its batches have added
    for _ in range(num_batches):
        kicks, total = kicks + np.outer(power @ kick, power @ kick), total + power @ kick
        power = drift @ power
        steps.append((power, kicks - np.outer(total, total) / num_batches))
    start = solve_discrete_lyapunov(*steps[-1])
    return np.asarray(thermal + np.mean([power @ start @ power.T + added for power, added in steps], 0))


def run(name: str, sampler: str, rate: float, batch_size: int, seed: int, effort: float, output: Path) -> None:
    """One row, unless the output has it."""
    key = {"kind": "sampler", "model": name, "sampler": sampler, "seed": seed, "effort": effort}
    settings = (
        {} if sampler == "NUTS" else {"learning_rate": round(rate * FRICTIONS[sampler], 9), "batch_size": batch_size}
    )
    if is_done(output, key | settings):
        return
    given = problem(name, seed)
    mean, covariance = posterior(name, given, seed, effort, output)
    begun = time.process_time()
    if sampler == "NUTS":
        budget = BUDGET * effort
        chains = [nuts(given, seed, chain, budget, 100_000, effort) for chain in range(NUM_CHAINS)]
        draws = np.stack([own[: min(len(own) for own, _ in chains)] for own, _ in chains])
        count, found = sum(count for _, count in chains), {"program": "Pyro's, with jit_compile"}
    else:
        draws, count, found = annealed(given, settings, FRICTIONS[sampler], seed, effort)
    seconds = time.process_time() - begun
    row = key | settings | errors(draws, mean, covariance) | found
    if sampler != "NUTS":
        noise = np.cov(given.gradients(mean).T)
        row |= predicted(given.curvature(mean), noise, settings["learning_rate"], FRICTIONS[sampler], batch_size)
    ess = effective(draws)
    row |= {"ess": ess, "ess_per_gradient": ess / count, "ess_per_second": ess / seconds}
    append_row(
        output, row | {"num_draws": draws.shape[1], "gradients": count, "cpu_seconds": round(seconds, 2)}, "arviz"
    )


def annealed(
    given: Problem, settings: dict[str, Any], friction: float, seed: int, effort: float
) -> tuple[Array, int, Row]:
    """Draws (chain, draw, weight) of ``ps.anneal`` after the first fifth, full gradients of all chains, and what it says."""
    batch_size = settings["batch_size"]
    steps = int(BUDGET * effort * NUM_ROWS / batch_size)
    num_draws = min(NUM_DRAWS, steps)
    schedule = ps.PriorAnnealing(0, 0, 0, 0, steps, learning_rate=settings["learning_rate"], friction=friction)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the heat that is measured here
        run = ps.anneal(
            *(given.model, given.data, schedule, None if batch_size == NUM_ROWS else batch_size),
            **{"num_draws": num_draws, "num_chains": NUM_CHAINS, "seed": seed, "progress": False},
        )
    first = num_draws // 5
    statistics = run.trace["sample_stats"].to_dataset().isel(draw=slice(first, None))
    found = {
        "program": run.trace.attrs["program"],
        "heat_estimate": float(statistics["minibatch_temperature"].mean()),
        "kinetic": float(statistics["kinetic_temperature"].mean()) - 1,
    }
    draws = run.draws[:, first:].double().numpy()
    return draws, NUM_CHAINS * steps * batch_size // NUM_ROWS, found


# Learning rates at step t, counted from 1, of path averages.
PATHS: dict[str, Callable[[int], float]] = {
    "0.1": lambda t: 0.1,
    "0.03": lambda t: 0.03,
    "0.01": lambda t: 0.01,
    "0.2 t^(-1/3)": lambda t: 0.2 * t ** (-1 / 3),
}
NUM_PATHS, PATH_ROWS, PATH_BATCH, PATH_STEPS, PATH_RISE = 256, 100, 10, 200_000, 100


def path(name: str, seed: int, effort: float, output: Path) -> None:
    """Averages of (w - mean)² / variance, whose truth is 1, along the paths of many chains: one row, unless it is there.

    w is the mean of normal responses of variance 1 under a N(0, 1) prior, whose power rises from 0 to 1 over the first steps.
    """
    key = {"kind": "path", "learning_rate": name, "seed": seed, "effort": effort}
    if is_done(output, key):
        return
    steps = int(PATH_STEPS * effort)
    looks = sorted({round(t) for t in np.geomspace(10, steps, 60)})
    begun = time.process_time()
    averages = np.stack([found for _, found in zip(looks, _averages(PATHS[name], seed, looks), strict=True)])
    row = {"steps": looks, "bias": _rounded(averages.mean(1) - 1), "spread": _rounded(averages.std(1, ddof=1))}
    append_row(output, key | row | {"cpu_seconds": round(time.process_time() - begun, 1)})


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _averages(rate: Callable[[int], float], seed: int, looks: list[int]) -> Iterator[Array]:
    """Of each chain the average so far, weighed by the learning rate, at some steps; (chains,) each."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(PATH_ROWS, generator=generator, dtype=torch.float64)
    mean, precision = y.sum() / (PATH_ROWS + 1), PATH_ROWS + 1
    state = sghmc.init(torch.zeros(NUM_PATHS, dtype=torch.float64))
    total, weight = torch.zeros(NUM_PATHS, dtype=torch.float64), 0.0
    for t in range(1, looks[-1] + 1):
        controls = ps.Controls(rate(t), 1.0, 1.0, min(1.0, t / PATH_RISE), 1.0, 0.0)
        batch = y[torch.randint(PATH_ROWS, (NUM_PATHS, PATH_BATCH), generator=generator)]
        gradient = state.position * (1 + controls.prior_power / PATH_ROWS) - batch.mean(1)
        noise = torch.randn(NUM_PATHS, generator=generator, dtype=torch.float64)
        state = sghmc.step(state, gradient, noise, controls, PATH_ROWS)
        total += controls.learning_rate * precision * (state.position - mean).square()
        weight += controls.learning_rate
        if t in looks:
            yield (total / weight).numpy()


COLUMNS = (  # heading, what is shown, its standard error
    ("bias of mean (noise)", "mean_bias", "mean_noise"),
    ("bias of sd (s.e.)", "sd_bias", "sd_error"),
    ("excess variance (s.e.)", "excess", "excess_error"),
    ("exact law", "law", ""),
    ("heat", "heat", ""),
    ("kinetic", "kinetic", ""),
    ("its law", "kinetic_law", ""),
    ("ESS a gradient", "ess_per_gradient", ""),
    ("ESS a second", "ess_per_second", ""),
)
NOTE = """\
Four chains of 4,000 full gradients each, start, tracing, compiling and adaptation included; 1,000 rows, ten weights, one data
set. Biases are in units of the posterior's standard deviation: of the mean the root mean square over weights, beside what
Monte Carlo noise alone would give; of the standard deviation its relative error. "Excess variance" is in the metric of the
posterior, 0 where it is right. "Exact law" is that of the chain (of a normal approximation for the logistic model), whose
batches are parts of a permutation of the rows; "heat" is learning_rate N Var(g) / (2 friction m), which takes batches for
independent; "kinetic" is the excess of the momenta, beside its law. ESS is that of the worst weight; kept draws bound it by
about 0.8 a gradient.
"""


def table(rows: list[Row]) -> str:
    """A table a model, and one of path averages."""
    lines, headings = [NOTE], " | ".join(heading for heading, *_ in COLUMNS)
    for name in MODELS:
        found = [row for row in rows if row["kind"] == "sampler" and row["model"] == name]
        if found:
            lines += [f"**{name}**", "", f"| sampler | batch | learning rate | {headings} |"]
            lines += ["|" + "---|" * (3 + len(COLUMNS)), *(_line(row) for row in found), ""]
    paths = [row for row in rows if row["kind"] == "path"]
    if paths:
        at = [t for t in (1_000, 10_000, 100_000, paths[0]["steps"][-1]) if t <= paths[0]["steps"][-1]]
        lines += ["**Path averages** of (w - mean)² / variance: bias, and root mean squared error of one path", ""]
        lines += [f"| learning rate | {' | '.join(f'{t:,} steps' for t in at)} |", "|" + "---|" * (1 + len(at))]
        for row in paths:
            where = [int(np.abs(np.log(np.array(row["steps"]) / t)).argmin()) for t in at]
            cells = [f"{row['bias'][i]:.3f}, {math.hypot(row['bias'][i], row['spread'][i]):.3f}" for i in where]
            lines.append(f"| {row['learning_rate']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    size = row.get("batch_size", NUM_ROWS)
    cells = [row["sampler"], "all" if size == NUM_ROWS else str(size), str(row.get("learning_rate", ""))]
    for _, name, error in COLUMNS:
        value = "" if name not in row else f"{row[name]:.{3 if row[name] < 1 else 2 if row[name] < 10 else 0}f}"
        cells.append(f"{value} ({row[error]:.3f})" if error else value)
    return f"| {' | '.join(cells)} |"


def picture(rows: list[Row], output: Path) -> None:
    """Bias and root mean squared error of path averages along the way."""
    import matplotlib.pyplot as plt

    found = [row for row in rows if row["kind"] == "path"]
    if not found:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", sharey=True)
    for row, colour in zip(found, ("#CC79A7", "#56B4E9", "#009E73", "#D55E00"), strict=False):
        steps, bias, spread = (np.array(row[name]) for name in ("steps", "bias", "spread"))
        falls = "t" in row["learning_rate"]
        line = {"color": colour, "linewidth": 2.2 if falls else 1.4}
        label = "$0.2\\,t^{-1/3}$" if falls else f"constant {row['learning_rate']}"
        left.loglog(steps, np.abs(bias), label=label, **line)
        right.loglog(steps, np.hypot(bias, spread), label=label, **line)
    steps = np.array(found[-1]["steps"])
    last = np.array([found[-1]["bias"][-1], found[-1]["spread"][-1]])
    for axes, level, title in (
        (left, abs(last[0]), "bias, from 256 paths"),
        (right, float(np.hypot(*last)), "root mean squared error of one path"),
    ):
        rate = level * (steps / steps[-1]) ** (-1 / 3)
        axes.plot(steps, rate, color="0.4", linestyle="--", linewidth=1, label="rate $t^{-1/3}$")
        axes.set(xlabel="steps t", xlim=(100, 1.1 * steps[-1]), ylim=(0.025, 1.5))
        axes.set_title(title, loc="left")
        axes.set_yticks([0.03, 0.1, 0.3, 1], ["0.03", "0.1", "0.3", "1"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    left.set(ylabel="|average of (w - mean)² / variance - 1|")
    right.legend(frameon=False, title="learning rate", fontsize=8, loc="lower left")
    figure.savefig(output.with_suffix(".png"), dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*MODELS, "paths", []], help="all of them where left out")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="1000 is all rows")
    parser.add_argument("--seeds", type=seeds, default=[1], help="of data and chains, such as 1-3")
    parser.add_argument("--effort", type=float, default=1.0, help="multiplies steps, for smoke tests")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts, shared = arguments.parts or [*MODELS, "paths"], (arguments.effort, arguments.output)
    for seed in [] if arguments.table else arguments.seeds:
        for name in PATHS if "paths" in parts else ():
            path(name, seed, *shared)
        for name in (part for part in MODELS if part in parts):
            run(name, "NUTS", 0.0, NUM_ROWS, seed, *shared)
            for sampler in FRICTIONS:
                for batch_size in arguments.batches:
                    for rate in RATES:
                        run(name, sampler, rate, batch_size, seed, *shared)
    rows = [
        r for r in read_rows(arguments.output) if r["effort"] == arguments.effort and r["seed"] == arguments.seeds[0]
    ]
    text = table(rows)
    arguments.output.with_suffix(".md").write_text(text)
    picture(rows, arguments.output)
    print(text)


if __name__ == "__main__":
    main()
