"""The paper's regression at full size: 2000-10000-100-10-1, 21 million weights, 10,000 rows, one run.

    python benchmarks/gpu/regression.py --settings paper --minutes 6 --output "$OUT/regression.jsonl"
    python benchmarks/gpu/regression.py --settings ours --minutes 4 --output "$OUT/regression.jsonl"
    python benchmarks/gpu/regression.py --smoke --device cpu             seconds, a tiny network

``paper``: section A.6, 80,000 steps, its prior, noise variance 1, data as they are. ``ours``: what SparseRegressor does in a
round, 20,000 steps, the prior derived from network and rows, noise learned, data standardised. First a check against double
precision on the CPU, then the time of a step; where ``--minutes`` do not hold the schedule, all of its phases are shortened
by the same factor, which the last line states (and the numbers are then not those of the full schedule). One JSON line a
stage, so that a run cut off leaves what it reached.
"""

import argparse
import copy
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import PROB, RESULTS, Data, Row, append_row, interval_metrics, mean_square, paper_data, selection_errors

import pyro_sparse as ps
from pyro_sparse.estimators import default_schedule
from pyro_sparse.inference.structure import compact

HIDDEN = (10_000, 100, 10)
BATCH = 500
MAX_KEPT = 5_000  # weights up to which their information matrix is worth its time


@dataclass(frozen=True)
class Settings:
    """A model of standardised or raw data, and the schedule that goes with it."""

    schedule: ps.PriorAnnealing
    prior: ps.SpikeSlab | None
    standardised: bool

    def model(self, sizes: list[int], num_rows: int, like: Tensor, seed: int) -> Callable[..., Any]:
        """The Pyro model around a network with fresh weights."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            net = ps.SparseNet(sizes, prior=self.prior).to(like)
        return self.around(net, num_rows)

    def around(self, net: ps.SparseModule, num_rows: int) -> Callable[..., Any]:
        """The Pyro model around a network."""
        if self.standardised:
            return ps.normal_regression(net, num_rows)

        def model(x: Tensor, y: Tensor | None = None) -> Any:
            mean = net(x).squeeze(-1)
            with pyro.plate("data", num_rows, subsample_size=len(x)):
                return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

        return model


def settings(name: str, num_rows: int) -> Settings:
    """The paper's, where its numbers are variances, or ours."""
    if name == "ours":
        return Settings(default_schedule(num_rows, 20_000), None, True)
    prior = ps.SpikeSlab(1e-7, math.sqrt(1e-6), math.sqrt(1e-2), math.sqrt(5e-5))
    return Settings(ps.PriorAnnealing.paper_regression(), prior, False)


def shortened(schedule: ps.PriorAnnealing, share: float) -> ps.PriorAnnealing:
    """The same phases, each of a share of its steps."""
    names = ("train_steps", "power_steps", "spike_steps", "cool_steps", "sample_steps")
    steps = {name: getattr(schedule, name) for name in names}
    return replace(schedule, **{name: max(1, round(share * number)) for name, number in steps.items() if number})


class Scaling:
    """Data as the model sees them, and predictions back in units of the response."""

    def __init__(self, data: Data, standardised: bool, device: str) -> None:
        x, y = data.train.x, data.train.y
        self.device = device
        self.centre, self.spread = (
            (x.mean(0), x.std(0)) if standardised else (np.zeros(x.shape[1]), np.ones(x.shape[1]))
        )
        self.level, self.scale = (float(y.mean()), float(y.std())) if standardised else (0.0, 1.0)

    def inputs(self, x: np.ndarray) -> Tensor:
        return torch.as_tensor((x - self.centre) / self.spread, dtype=torch.float32, device=self.device)

    def response(self, y: np.ndarray) -> Tensor:
        return torch.as_tensor((y - self.level) / self.scale, dtype=torch.float32, device=self.device)


def reference_error(how: Settings, device: str) -> float:
    """Largest difference of the weights after 50 steps at temperature 0 from those in double precision on the CPU."""
    data = paper_data(1, 400, 20, 10)
    rows = [torch.as_tensor(a) for a in (data.train.x, data.train.y / (5 if how.standardised else 1))]
    schedule = replace(how.schedule, train_steps=10, power_steps=20, spike_steps=20, cool_steps=0, temperature=0.0)
    likes = [torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float32, device=device)]
    models = [how.model([20, 8, 4, 1], 400, like, 0) for like in likes]  # drawn in single precision, both the same
    ends, usual = [], torch.get_default_dtype()
    for like, model in zip(likes, models, strict=True):
        torch.set_default_dtype(like.dtype)
        run = ps.anneal(model, tuple(r.to(like) for r in rows), schedule, 100, num_draws=1, progress=False)
        ends.append(run.positions.double().cpu())
    torch.set_default_dtype(usual)
    return float((ends[0] - ends[1]).abs().max())


def seconds_a_step(model: Any, rows: tuple[Tensor, Tensor], how: Settings, batch: int, num_steps: int) -> float:
    """Of a full step (gradient, prior, noise), start and tracing left out: the difference of two runs, after a warm-up."""
    spent = []
    for steps in (5, 5, 5 + num_steps):
        schedule = replace(how.schedule, train_steps=0, power_steps=0, spike_steps=steps, cool_steps=0)
        begun = time.perf_counter()
        ps.anneal(model, rows, schedule, batch, num_draws=1, progress=False)
        _synchronise(rows[0])
        spent.append(time.perf_counter() - begun)
    return max((spent[2] - spent[1]) / num_steps, 1e-6)


def _synchronise(like: Tensor) -> None:
    if like.device.type == "cuda":
        torch.cuda.synchronize(like.device)


def small_run(run: ps.Run, structure: ps.Structure, how: Settings, rows: tuple[Tensor, Tensor]) -> ps.Run:
    """The selected network as a run of its own, live units and selected inputs only: what refit needs, without 21 million
    coordinates. One step of no length stands for the annealing; its prior only tells zeros from the rest.
    """
    (module,) = run.spec.layout.modules()
    network = copy.deepcopy(module.module).cpu()
    with torch.no_grad():
        for name, site in run.spec.layout.of_module(module).items():
            network.get_parameter(name).copy_(structure.values[site.name])
    net = ps.sparsify(compact(network), ps.SpikeSlab(0.5, 1e-5, 1.0))
    small = (rows[0][:, structure.input_indices].cpu(), rows[1].cpu())
    no_step = ps.PriorAnnealing(0, 0, 0, 1, learning_rate=1e-30, temperature=0.0)
    return ps.anneal(how.around(net, len(small[1])), small, no_step, num_draws=1, progress=False)


def assess(run: ps.Run, how: Settings, rows: tuple[Tensor, Tensor], data: Data, scaling: Scaling) -> Row:
    """Refit, errors and intervals."""
    structure = ps.select(run)
    if not 0 < len(structure.input_indices) <= structure.num_kept <= MAX_KEPT:
        return {"refit": f"left out: {structure.num_kept} weights kept"}
    small = small_run(run, structure, how, rows)
    fit = ps.refit(small, ps.select(small).with_biases())
    residuals = (fit.response.observed(fit.values) - fit.evaluate(fit.mean, fit.data)).numpy() * scaling.scale
    row = {"refitted": fit.structure.num_kept, "converged": fit.converged, "msfe": mean_square(residuals)}
    found = ps.predict(fit, scaling.inputs(data.test.x)[:, structure.input_indices].cpu(), PROB)
    mean, lower, upper = (found[name].values * scaling.scale + scaling.level for name in ("mean", "lower", "upper"))
    errors = {"mspe": mean_square(mean - data.test.y), "excess_error": mean_square(mean - data.test.f)}
    return row | errors | interval_metrics(data.test.y, lower, upper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", choices=("paper", "ours"), default="paper")
    parser.add_argument("--seed", type=int, default=1, help="of the data set and the run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=6.0, help="for annealing; phases are shortened to fit")
    parser.add_argument("--smoke", action="store_true", help="a tiny network and 200 steps")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_regression.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.smoke else torch.get_num_threads())
    num_rows, num_inputs, hidden = (1_000, 20, (30, 10, 5)) if arguments.smoke else (10_000, 2_000, HIDDEN)
    how = settings(arguments.settings, num_rows)
    if arguments.smoke:
        how = replace(how, schedule=shortened(how.schedule, 200 / how.schedule.num_steps))
    sizes, batch = [num_inputs, *hidden, 1], min(BATCH, num_rows // 2)
    card = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else "cpu"
    about = {"settings": arguments.settings, "seed": arguments.seed, "card": card, "smoke": arguments.smoke}

    def report(stage: str, row: Row) -> None:
        append_row(arguments.output, about | {"stage": stage, "network": "-".join(map(str, sizes))} | row)

    report("reference", {"largest_difference": reference_error(how, arguments.device)})
    data = paper_data(arguments.seed, num_rows, num_inputs)
    scaling = Scaling(data, how.standardised, arguments.device)
    rows = scaling.inputs(data.train.x), scaling.response(data.train.y)
    model = how.model(sizes, num_rows, rows[0], arguments.seed)
    step = seconds_a_step(model, rows, how, batch, 20 if arguments.smoke else 200)
    share = min(1.0, 60 * arguments.minutes / (step * how.schedule.num_steps))
    schedule = how.schedule if share == 1 else shortened(how.schedule, share)
    report("step", {"seconds_a_step": step, "share_of_schedule": share, "num_steps": schedule.num_steps})

    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = ps.anneal(model, rows, schedule, batch, num_draws=1, seed=arguments.seed, progress=False)
        _synchronise(rows[0])
        row: Row = {"anneal_seconds": time.perf_counter() - begun, "num_steps": schedule.num_steps}
        structure = ps.select(run)
        report("annealed", row | selection_errors(structure.input_indices) | {"kept": structure.num_kept})
        row |= selection_errors(structure.input_indices) | {"kept": structure.num_kept}
        row |= assess(run, how, rows, data, scaling)
    peak = torch.cuda.max_memory_allocated(arguments.device) / 2**30 if card != "cpu" else None
    row |= {"seconds": time.perf_counter() - begun, "seconds_a_step": step, "share_of_schedule": share}
    report("done", row | {"peak_gib": peak, "warnings": sorted({str(w.message) for w in caught})[:3]})


if __name__ == "__main__":
    main()
