"""Whether draws are a posterior: convergence of what a network computes, and the temperature of its chains."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from pyro_sparse.inference.family import Family, unwrapped
from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.matching import Matching
from pyro_sparse.inference.potential import Evaluation, Potential
from pyro_sparse.inference.response import Response
from pyro_sparse.inference.run import Run
from pyro_sparse.inference.selection import inputs_read

WORK = 50_000_000  # rows times weights of one gradient
MIN_DRAWS = 8  # of a chain: two halves of four
MAX_R_HAT, MIN_ESS = 1.01, 100  # Vehtari et al. (2021); the second for each chain
APART = 1.5  # R-hat from which on more steps of the same kind are no remedy
FALSE_ALARM = 1e-3  # that R-hat of any quantity exceeds its limit by chance
SIGNIFICANT, MATERIAL = 4.0, 0.1  # standard errors; share of the temperature, 5 % of a standard deviation

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What ``diagnose`` found; printed, the verdict, the temperatures and the quantity of each kind that mixes worst.

    Attributes:
        table: over ``quantity``: ``mean``, ``sd``, ``r_hat``, ``ess_bulk``, ``ess_tail``; the last three are NaN where the
            quantity is constant. Its attribute ``num_rows`` is how many rows the log-likelihood is of.
        temperatures: over ``chain``: ``kinetic`` and ``configurational`` with their standard errors ``kinetic_se`` and
            ``configurational_se``, the ``nominal`` one, and what ``minibatch`` noise adds (NaN where a batch is more than
            half of the rows).
        verdict: a sentence, with a remedy where something is wrong.
    """

    table: xr.Dataset
    temperatures: xr.Dataset
    verdict: str

    def __repr__(self) -> str:
        return f"Diagnosis({self.verdict})"

    def __str__(self) -> str:
        heat = self.temperatures.to_dataframe().round(3).to_string()
        table = self.table.to_dataframe()
        varies = table["r_hat"].notna()
        kinds = table.index.str.split("[").str[0]
        worst = table[varies].groupby(kinds[varies], sort=False)["ess_bulk"].idxmin()
        constant = list(table.index[~varies])
        lines = [self.verdict, "", "temperatures", heat, "", "of each kind, what mixes worst"]
        lines.append(
            table.loc[worst].round({"r_hat": 3, "ess_bulk": 0, "ess_tail": 0}).to_string(float_format="{:.5g}".format)
        )
        if constant:
            more = f" and {len(constant) - 8} more" if len(constant) > 8 else ""
            lines.append(f"constant in all draws: {', '.join(constant[:8])}{more}")
        return "\n".join(lines)


def diagnose(run: Run, x: Any = None, num_rows: int = 100, num_projections: int = 10) -> Diagnosis:
    """Whether the chains of a sampling phase agree, move, and have the temperature they should have.

    Raw weights of a network cannot be compared between chains, so what it computes is looked at: the mean response at some
    rows, ``mean[row]``; ``log_likelihood``; the number of weights included, ``num_included``; whether a live path leaves
    each input, ``input[name]``; and ``projection[i]``, products of the unconstrained position with random signs over the
    root of its length, taken after the hidden units are brought into one order (see ``matched``; networks that cannot be
    matched are taken as they are, and may show several modes that are one function). R-hat (rank-normalised, of split
    chains) and effective sample sizes are ArviZ's. R-hat should be under 1.01, or what chance allows with so few draws,
    and effective sample sizes at least 100 for each chain.

    The kinetic temperature of a chain is that of its momenta; the configurational one is
    ``mean((z - c) · ∇U(z)) / d``, over draws z of d parameters (running statistics of BatchNorm, which have no gradient, are
    none), U the potential that was sampled and c the mean of the other half of the chain: nearly independent of z, it needs
    no correction. Both are the nominal temperature times 1 + O(learning rate × curvature), plus what minibatch noise adds.
    Once the chain has settled, E |z - c|² is constant, which makes them equal for any potential and learning rate, but that
    batches of an epoch, which do not repeat a row, move positions less than momenta. Two that differ by more are of a chain
    that is still on its way; draws too hot are biased. Both count where the average over the chains is off by four standard
    errors and by a tenth, 5 % of a standard deviation.

    Draws are read one at a time, twice. A gradient takes all rows where rows times weights are fewer than 5e7, else a
    batch of that many, a new one for each draw, which leaves it unbiased; the log-likelihood then is of as many evenly
    spaced rows (of a DataLoader, its first batch), scaled up.

    With ``sparse_draws`` what is looked at is computed without the weights that a draw does not include, and the
    configurational temperature, which needs them, is NaN.

    Args:
        run: one that ends with a sampling phase, of at least 8 draws a chain, in memory or on disk.
        x: the model's arguments without its response, at which to look at the mean response; the rows of the data where it
            is left out.
        num_rows: how many of these rows, evenly spaced, >= 1.
        num_projections: >= 0.

    Raises:
        ValueError: naming the argument, the rule and the value; for a run that ends by cooling, whose draws surround a
            mode and are no posterior.
        ImportError: where ArviZ is not installed.

    Source: Vehtari, Gelman, Simpson, Carpenter and Bürkner, Rank-normalization, folding, and localization (2021);
    Leimkuhler and Matthews, Molecular Dynamics (2015), for the temperatures.
    """
    _check(run, num_rows, num_projections)
    quantities = _Quantities(run, x, num_rows, num_projections)
    num_chains, num_draws, _ = run.draws.shape
    values, heat = [], np.full((num_chains, num_draws), np.nan)
    with torch.no_grad(), torch.random.fork_rng(_devices(run.positions)):
        torch.manual_seed(0)  # of models that draw random numbers
        for chain in range(num_chains):
            centres = None if run.is_sparse else _means_of_halves(run, chain)
            for draw in tqdm(range(num_draws), f"diagnosis of chain {chain + 1}", delay=2, leave=False, unit="draw"):
                position, evaluation = run.draws[chain, draw], None
                if centres is not None:
                    evaluation = quantities.gradient(position, chain, draw)
                    away = position - centres[int(2 * draw < num_draws)]
                    products = run.spec.layout.parameters(away * evaluation.mean_gradient)
                    heat[chain, draw] = run.spec.num_data * float(products.double().mean())
                values.append(quantities(position, evaluation))
    of_draws = np.array(values).reshape(num_chains, num_draws, -1)
    table = _table(quantities.names, of_draws).assign_attrs(num_rows=quantities.num_rows)
    temperatures = _temperatures(run, heat)
    return Diagnosis(table, temperatures, verdict(table, temperatures, num_draws))


def _check(run: Run, num_rows: int, num_projections: int) -> None:
    if not isinstance(run, Run):
        raise TypeError(f"run must be a Run of anneal, got {type(run).__name__}")
    schedule = run.schedule
    if schedule.last_phase != "sample":
        raise ValueError(
            "the run must end with a sampling phase to be diagnosed, got one that ends with "
            f"'{schedule.last_phase}', whose draws surround a mode: set sample_steps in the schedule"
        )
    if not schedule.sample_temperature > 0:
        raise ValueError(f"sample_temperature must be > 0 for draws to be diagnosed, got {schedule.sample_temperature}")
    if not run.draws.shape[1] >= MIN_DRAWS:
        raise ValueError(f"run must hold at least {MIN_DRAWS} draws a chain, got {run.draws.shape[1]}: raise num_draws")
    for name, number, least in (("num_rows", num_rows, 1), ("num_projections", num_projections, 0)):
        if not isinstance(number, Integral) or number < least:
            raise ValueError(f"{name} must be a whole number >= {least}, got {number}")


def _devices(like: Tensor) -> list[int]:
    return [like.device.index or 0] if like.is_cuda else []


def _means_of_halves(run: Run, chain: int) -> Tensor:
    """(2, coordinate): of the first half of a chain's draws, and of the second."""
    num_draws, sums = run.draws.shape[1], torch.zeros(2, run.draws.shape[2]).to(run.positions)
    counts = sums.new_tensor([-(-num_draws // 2), num_draws // 2])
    for draw in range(num_draws):
        sums[int(2 * draw >= num_draws)] += run.draws[chain, draw]
    return sums / counts[:, None]


class _Quantities:
    """What is looked at in each draw: ``names``, and their values at a position and the evaluation there."""

    def __init__(self, run: Run, x: Any, num_rows: int, num_projections: int) -> None:
        self.run, spec = run, _with_more_rows(run.spec)
        self.num_rows = spec.batch_size or spec.num_data
        self._potential = Potential(spec)
        last, like = run.schedule.at(run.schedule.num_steps - 1), run.positions[0]
        self._tempering = Potential.tempering(last.prior_power, last.spike_progress, last.temperature, like)
        chains = range(len(run.positions))
        self._batches = [spec.batches(run.seed, chain, like.device, "diagnosis") for chain in chains]
        # Of a DataLoader those of its first batch.
        self._even = _evenly(spec.num_data, self.num_rows, like.device) if spec.loader is None else spec.data
        self._means = [_Mean(run, site, x, num_rows) for site in spec.responses] if spec.data else []
        matching = Matching.of(run) if num_projections else None
        self._matching = matching if matching is not None and matching.hidden else None
        self._projection = _Projection(len(like), num_projections, run.seed)
        self._thresholds = spec.layout.thresholds(like)
        self.names: list[str] = []

    def gradient(self, position: Tensor, chain: int, draw: int) -> Evaluation:
        """Of the potential that was sampled, at a draw, on all rows or a batch of its own."""
        return self._potential(position, self._tempering, self._batches[chain](draw))

    def __call__(self, position: Tensor, evaluation: Evaluation | None) -> list[float]:
        found = [pair for part in self._parts(position, evaluation) for pair in part]
        self.names = [name for name, _ in found]
        return [value for _, value in found]

    def _parts(self, position: Tensor, evaluation: Evaluation | None) -> Iterator[list[tuple[str, float]]]:
        spec = self._potential.spec
        values = spec.layout.constrained(position)
        for mean in self._means:
            yield mean(values)
        yield [("log_likelihood", self._log_likelihood(values, evaluation))]
        if spec.layout.spike_slab_sites():
            yield [("num_included", float((position.abs() > self._thresholds).sum()))]
            read, names = inputs_read(self.run, position), self.run.input_names
            yield [(f"input[{i if names is None else names[i]}]", float(on)) for i, on in enumerate(read.tolist())]
        moved = position if self._matching is None else self._matching(position)
        yield [(f"projection[{i}]", value) for i, value in enumerate(self._projection(moved).tolist())]

    def _log_likelihood(self, values: dict[str, Tensor], evaluation: Evaluation | None) -> float:
        spec = self._potential.spec
        if evaluation is not None and spec.batch_size is None:
            log_prob = evaluation.log_prob
        else:  # there is none, or of other rows at each draw
            log_prob = self._potential.log_prob(values, self._tempering, *self._potential.inputs(self._even))
        return float(sum(log_prob[site] for site in spec.observed))


def _with_more_rows(spec: Specification) -> Specification:
    """The same with as many rows at once as are worth their time; models and loaders with a size of their own keep it."""
    if spec.subsamples_itself or spec.batch_size is None or spec.loader is not None:
        return spec
    size = max(spec.batch_size, min(spec.num_data, WORK // spec.layout.num_coordinates))
    return replace(spec, batch_size=None if size == spec.num_data else size)


def _evenly(num_data: int, num_rows: int, device: torch.device) -> Tensor:
    """Row numbers from the first to the last."""
    return torch.linspace(0, num_data - 1, min(num_rows, num_data), dtype=torch.float64, device=device).round().long()


class _Mean:
    """The mean response at evenly spaced rows, by the name of each number."""

    def __init__(self, run: Run, site: str, x: Any, num_rows: int) -> None:
        self._response, self._own = Response(run.spec, site), x is None
        data = run.spec.data if x is None else self._response.inputs(x)
        self._numbers = _evenly(len(data[0]), num_rows, data[0].device)
        self._inputs = tuple(item[self._numbers] for item in data)
        self._label = "mean" if len(run.spec.responses) == 1 else f"mean of {site}"
        try:
            self._family = self._response.family(run.spec.layout.constrained(run.positions[0]))
        except ValueError:  # a law of no family that is known
            self._family = Family()

    def _links(self, values: dict[str, Tensor]) -> Tensor:
        """By the numbers of the rows, which a model may use to look something up."""
        response = self._response
        if not self._own or response.spec.subsamples_itself:
            return response.evaluate(self._family.link, values, self._inputs)
        law = unwrapped(response.node(values, self._inputs, self._numbers)["fn"])
        return self._family.link(law)

    def __call__(self, values: dict[str, Tensor]) -> list[tuple[str, float]]:
        family = self._family
        means = family.mean(family.score(self._links(values)))
        names = [[int(self._numbers[place[0]]), *place[1:]] for place in np.ndindex(means.shape)]
        pairs = zip(names, means.reshape(-1).tolist(), strict=True)
        return [(f"{self._label}[{', '.join(map(str, name))}]", value) for name, value in pairs]


class _Projection:
    """Products with orthogonal rows of random signs, (num_projections,): random signs times rows of a Hadamard matrix."""

    def __init__(self, size: int, number: int, seed: int) -> None:
        from scipy.linalg import hadamard

        order = 1 << max(number - 1, 0).bit_length()
        generator = torch.Generator().manual_seed(seed % 2**63)
        self._signs = 1 - 2 * torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8)
        self._rows = torch.from_numpy(hadamard(order)[:number] / math.sqrt(size))

    def __call__(self, position: Tensor) -> Tensor:
        signed = (position * self._signs.to(position.device)).double()
        padding = -len(signed) % self._rows.shape[1]
        sums = torch.nn.functional.pad(signed, (0, padding)).reshape(-1, self._rows.shape[1]).sum(0)
        return self._rows @ sums.cpu()


def _table(names: list[str], values: Array) -> xr.Dataset:
    """Of values (chain, draw, quantity)."""
    columns = {"mean": values.mean((0, 1)), "sd": values.std((0, 1), ddof=1), **convergence(values)}
    return xr.Dataset({name: ("quantity", column) for name, column in columns.items()}, coords={"quantity": names})


def convergence(values: Array) -> dict[str, Array]:
    """``r_hat``, ``ess_bulk`` and ``ess_tail`` of values (chain, draw, quantity), by ArviZ.

    NaN where a quantity is constant; R-hat is infinite where it differs between chains and in none of them. Of one chain
    the halves are compared.
    """
    import arviz

    chains, draws, _ = values.shape
    varies = np.ptp(values, axis=(0, 1)) > 0
    found = {name: np.full(len(varies), np.nan) for name in ("r_hat", "ess_bulk", "ess_tail")}
    if varies.any():
        halves = values if chains > 1 else values[:, : draws // 2 * 2].reshape(2, draws // 2, -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            r_hat = arviz.rhat(_dataset(halves[:, :, varies]))["x"].values
        found["r_hat"][varies] = np.where(r_hat < 1e3, r_hat, np.inf)  # rounding makes numbers of 1 / 0
        found["ess_bulk"][varies] = arviz.ess(_dataset(values[:, :, varies]), method="bulk")["x"].values
        found["ess_tail"][varies] = arviz.ess(_dataset(values[:, :, varies]), method="tail", prob=(0.05, 0.95))[
            "x"
        ].values
    return found


def standard_errors(values: Array) -> Array:
    """Of the mean of each chain of values (chain, draw), by ArviZ's effective sample size."""
    import arviz

    alone = arviz.ess(_dataset(values.T[None]), method="mean")["x"].values
    return np.asarray(values.std(1, ddof=1) / np.sqrt(alone))


def _dataset(values: Array) -> xr.Dataset:
    return xr.Dataset({"x": (("chain", "draw", "quantity"), values)})


def _temperatures(run: Run, configurational: Array) -> xr.Dataset:
    statistics = run.trace["sample_stats"].to_dataset()
    kinetic = statistics["kinetic_temperature"].values
    columns = {
        "kinetic": kinetic.mean(1),
        "kinetic_se": standard_errors(kinetic),
        "configurational": configurational.mean(1),
        "configurational_se": standard_errors(configurational) if np.isfinite(configurational).all() else np.nan,
        "nominal": run.schedule.sample_temperature,
        "minibatch": statistics["minibatch_temperature"].values.mean(1),
    }
    chain = np.arange(len(kinetic))
    return xr.Dataset(
        {n: ("chain", np.broadcast_to(c, chain.shape)) for n, c in columns.items()}, coords={"chain": chain}
    )


def verdict(table: xr.Dataset, temperatures: xr.Dataset, num_draws: int) -> str:
    """A sentence, with a remedy where something is wrong: not mixing, too hot, not in equilibrium, one chain only."""
    num_chains = temperatures.sizes["chain"]
    known = {f"configurational{end}": temperatures[f"configurational{end}"] for end in ("", "_se")}
    temperatures = temperatures.assign(
        {
            name: values.fillna(temperatures[name.replace("configurational", "kinetic")])
            for name, values in known.items()
        }
    )
    mixing, heat = _mixing(table, num_chains, num_draws), _heat(temperatures)
    if mixing is not None:
        return f"{mixing}. {heat}." if heat is not None and heat.startswith("Biased") else f"{mixing}."
    if heat is not None:
        return f"{heat}."
    r_hat, ess = float(table["r_hat"].max()), float(_least_ess(table).min())
    found = (
        f"R-hat is at most {r_hat:.3f}, effective draws are at least {ess:.0f}, and the temperature is "
        f"{float(temperatures['configurational'].mean()):.3g} of {float(temperatures['nominal'][0]):.3g}"
    )
    if num_chains == 1:
        return f"One chain only, of which nothing bad is seen ({found}); num_chains=4 tells what it has missed."
    return f"Fine: {found}."


def _mixing(table: xr.Dataset, num_chains: int, num_draws: int) -> str | None:
    table = table.isel(quantity=np.flatnonzero(table["r_hat"].notnull()))
    if not table.sizes["quantity"]:
        return "Nothing moves: all that was looked at is constant; raise learning_rate or sample_steps"
    ess = _least_ess(table)
    worst = ess.idxmin().item()
    fewest, needed = float(ess.min()), MIN_ESS * num_chains
    if fewest < needed and fewest > num_chains * num_draws / 2:
        return (
            f"Too few draws to tell: the effective sample size of {worst} is {fewest:.0f} of at least {needed}, about "
            "one a draw; raise num_draws"
        )
    if (r_hat := float(table["r_hat"].max())) > APART and num_chains > 1:
        return (
            f"Not mixing: the chains are apart (R-hat {r_hat:.3g}, {fewest:.0f} effective draws of {worst}), still on their "
            "way or with networks that differ; raise train_steps, spike_steps and sample_steps"
        )
    if fewest < needed:
        return (
            f"Not mixing: the effective sample size of {worst} is {fewest:.0f} of at least {needed}, R-hat up to "
            f"{float(table['r_hat'].max()):.3g}; raise sample_steps, {needed / fewest:.2g} times or more"
        )
    excess = table["r_hat"] - _r_hat_limit(ess, num_chains, FALSE_ALARM / (2 * len(ess)))
    if (excess > 0).any():
        place = excess.idxmax().item()
        worst = float(table["r_hat"].sel(quantity=place))
        return f"Not mixing: R-hat of {place} is {worst:.3f}; raise sample_steps or num_chains"
    return None


def _least_ess(table: xr.Dataset) -> xr.DataArray:
    return table[["ess_bulk", "ess_tail"]].to_array().min("variable")


def _r_hat_limit(ess: xr.DataArray, num_chains: int, probability: float) -> xr.DataArray:
    """1.01, or what chains of the same law exceed with this probability.

    With n effective draws in each of 2 M half chains, R-hat² is about 1 + (F - 1) / n, and (2 M - 1) F chi-squared.
    """
    from scipy.stats import chi2

    halves = 2 * max(num_chains, 2)
    quantile = chi2.isf(probability, halves - 1) / (halves - 1)
    limit: xr.DataArray = ((1 + (quantile - 1) * halves / ess) ** 0.5).clip(min=MAX_R_HAT)
    return limit


def _heat(temperatures: xr.Dataset) -> str | None:
    """What is wrong with the temperatures, averaged over the chains."""
    mean = temperatures.mean("chain")
    names = ("kinetic", "configurational", "nominal", "minibatch")
    kinetic, configurational, nominal, noise = (float(mean[name]) for name in names)
    variances = (temperatures[["kinetic_se", "configurational_se"]] ** 2).mean() / temperatures.sizes["chain"]
    error, both = float(variances["configurational_se"]) ** 0.5, float(variances.to_array().sum()) ** 0.5
    below = max(kinetic - nominal, 0.0) if math.isnan(noise) else noise  # what batches of an epoch may take away
    apart = max(kinetic - below - configurational, configurational - kinetic)
    if apart > max(SIGNIFICANT * both, MATERIAL * nominal):
        return (
            f"Not in equilibrium: the configurational temperature is {configurational:.3g} and the kinetic one {kinetic:.3g}, "
            f"{apart / both:.0f} standard errors more apart than batches explain; raise sample_steps"
        )
    if configurational - nominal > max(SIGNIFICANT * error, MATERIAL * nominal):
        cause = f", of which minibatch noise adds at most {noise:.2g}" if noise > MATERIAL * nominal else ""
        remedy = "lower learning_rate" + ("" if noise == 0 else " or raise batch_size")
        return (
            f"Biased: the temperature of the draws is {configurational:.3g} in place of {nominal:.3g}{cause}; {remedy}"
        )
    if abs(configurational - nominal) > MATERIAL * nominal:
        return (
            f"Too little to tell the temperature: it is {configurational:.3g} with a standard error of {error:.2g}, in place "
            f"of {nominal:.3g}; raise sample_steps, or train_steps where chains start far away"
        )
    return None
