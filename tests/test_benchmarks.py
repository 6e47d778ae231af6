"""The benchmarks' own arithmetic: metrics by hand, rows that are made once, tables as they should read."""

import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyro_sparse as ps
from pyro_sparse.datasets import paper_regression
from pyro_sparse.inference.schedule import PHASES

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
DATA = Path(os.environ.get("PYRO_SPARSE_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "load.py").exists(), reason=f"no images in {DATA}; PYRO_SPARSE_DATA names another folder"
)


def test_selection_rates_are_pooled_over_data_sets(load: Any) -> None:
    common = load("common")
    first, second = common.selection_errors([0, 1, 2, 3, 4, 9]), common.selection_errors([0, 1])
    assert (first["num_selected"], first["num_false"], first["num_missed"]) == (6, 1, 0)
    assert (second["num_selected"], second["num_false"], second["num_missed"]) == (2, 0, 3)
    assert common.false_selection_rate([first, second]) == 1 / 8  # not the mean of 1/6 and 0
    assert common.negative_selection_rate([first, second]) == 3 / 10
    assert math.isnan(common.false_selection_rate([common.selection_errors([])]))
    assert common.selection_errors(None)["num_selected"] is None


def test_interval_metrics_by_hand(load: Any) -> None:
    common = load("common")
    y, lower, upper = np.array([0.0, 3.0, -1.0]), np.zeros(3), np.array([1.0, 2.0, 1.0])
    found = common.interval_metrics(y, lower, upper)
    assert found["coverage"] == pytest.approx(1 / 3)
    assert found["mean_width"] == pytest.approx(4 / 3)
    assert found["interval_score"] == pytest.approx((1 + (2 + 40 * 1) + (1 + 40 * 1)) / 3)


def test_conformal_half_width_is_the_right_order_statistic(load: Any) -> None:
    common = load("common")
    residuals = np.array([-3.0, 1.0, 2.0, -4.0])
    assert common.conformal_half_width(residuals, 0.6) == 3.0  # rank ceil(5 * 0.6) = 3
    assert common.conformal_half_width(residuals, 0.8) == 4.0
    assert common.conformal_half_width(residuals, 0.9) == math.inf  # more than four rows can promise


def test_data_continue_one_stream(load: Any) -> None:
    """As the paper's scripts draw them: the training rows do not depend on how many follow."""
    data = load("common").paper_data(3, 20, 6, num_held_out=5)
    assert [len(rows.y) for rows in (data.train, data.validation, data.test)] == [20, 5, 5]
    x, y, _ = paper_regression(3, 20, 6)
    assert np.array_equal(data.train.x, x) and np.array_equal(data.train.y, y)
    assert np.array_equal(data.test.y, paper_regression(3, 30, 6)[1][25:])


def test_validation_rows_that_tuned_do_not_calibrate(load: Any) -> None:
    common = load("common")
    data = common.paper_data(1, 10, 5, num_held_out=40)
    data.validation.y[:20] += 1e6  # seen by tuning: they must not widen the intervals
    row = common.evaluate(common.Fitted(lambda x: np.zeros(len(x)), [0], num_tuned=20), data)
    half = common.conformal_half_width(data.validation.y[20:])
    assert row["mean_width"] == pytest.approx(2 * half) and row["intervals"] == "split conformal"
    assert row["mspe"] == pytest.approx(np.mean(data.test.y**2))


def test_seeds_are_read(load: Any) -> None:
    assert load("common").seeds("1-3,7") == [1, 2, 3, 7]


def test_a_row_is_made_once_and_a_cut_line_is_left_out(load: Any, tmp_path: Path) -> None:
    """Killed while it writes, the table makes that row again and no other."""
    table, common = load("regression_table"), load("common")
    output = tmp_path / "rows.jsonl"
    made = []

    def fit(data: Any, seed: int, effort: float) -> Any:
        made.append(seed)
        return common.Fitted(lambda x: x[:, 1], [1])

    table.load = lambda name: fit
    for seed in (1, 2, 1):
        table.run("LASSO", seed, 30, 6, 1.0, output)
    assert made == [1, 2]
    output.write_text(output.read_text()[:-20])
    assert [row["seed"] for row in common.read_rows(output)] == [1]
    table.run("LASSO", 2, 30, 6, 1.0, output)
    table.run("LASSO", 1, 31, 6, 1.0, output)  # another size is another row
    assert [(row["seed"], row["num_rows"]) for row in common.read_rows(output)] == [(1, 30), (2, 30), (1, 31)]
    assert json.loads(output.read_text().splitlines()[0])["environment"]["torch"] == torch.__version__


def test_table_shows_mean_and_spread_beside_the_papers(load: Any) -> None:
    table = load("regression_table")
    shared = {"network": "", "note": "a note", "intervals": "own", "coverage": 0.95, "interval_score": 4.7}
    rows = [
        {"method": "LASSO", "num_selected": n, "num_false": n - 5, "num_missed": 0, "msfe": m, "mspe": m + 1}
        | {"mean_width": 4.0, "cpu_seconds": 10.0}
        | shared
        for n, m in ((5, 1.0), (15, 2.0))
    ]
    lines = table.table(rows).splitlines()
    own = next(line for line in lines if line.startswith("| LASSO |"))
    assert own.startswith("| LASSO | 2 | 10.0 (7.1) | 0.500 | 0.000 | 1.500 (0.707) | 2.500 (0.707) | 0.950 (0.000) |")
    paper = next(line for line in lines if line.startswith("| LASSO, paper"))
    assert "566.8 (4.844) | 0.993 | 0.26 | 8.542 (0.022) | 9.496 (0.148)" in paper
    assert own.count("|") == paper.count("|") == len(table.COLUMNS) + 1
    assert "- LASSO: no network; own intervals; a note" in lines
    assert table.mean_sd([{"v": 1.17e-5}], "v", 3) == "1.17e-05"


def test_covered_points_survive_the_file(load: Any, tmp_path: Path) -> None:
    coverage, common = load("interval_coverage"), load("common")
    points = coverage.test_points(6, seed=4)
    assert np.array_equal(points.x, coverage.test_points(6, seed=5).x)  # fixed inputs,
    assert not np.array_equal(points.y, coverage.test_points(6, seed=5).y)  # new responses
    half = np.linspace(0.0, 3.0, len(points.y))
    row = coverage.describe(coverage.Intervals(points.f - half, points.f + half), points)
    common.append_row(tmp_path / "rows.jsonl", row)
    (read,) = common.read_rows(tmp_path / "rows.jsonl")
    inside = np.abs(points.y - points.f) <= half
    assert np.array_equal(coverage.covered(read), inside)
    assert read["coverage"] == pytest.approx(inside.mean())
    assert abs(read["exact_coverage"] - inside.mean()) < 0.05  # the law of the noise against a thousand draws of it
    assert len(read["shown"][0]) == coverage.NUM_SHOWN


def test_the_proximal_map_minimises_what_it_should(load: Any) -> None:
    """Against a fine grid over two weights of one input."""
    spinn = load("rivals.spinn")
    weight, reach = torch.tensor([[1.0], [-0.4]]), 0.5
    grid = torch.cartesian_prod(torch.linspace(-0.5, 1.0, 301), torch.linspace(-0.5, 1.0, 301))
    penalty = spinn.MIX * grid.abs().sum(1) + (1 - spinn.MIX) * grid.norm(dim=1)
    best = grid[(0.5 * (grid - weight.T).square().sum(1) + reach * penalty).argmin()]
    assert torch.allclose(spinn.shrunk(weight, reach)[:, 0], best, atol=0.006)
    assert not spinn.shrunk(weight, 5.0).any()


def test_evidence_is_exact_for_a_linear_network(load: Any) -> None:
    """Laplace's approximation has no error where the log-posterior is quadratic: against the normal law of y."""
    import pyro
    import pyro.distributions as dist

    evidence = load("rivals.evidence")
    x = torch.randn(40, 2)
    y = x @ torch.tensor([0.7, -1.2]) + torch.randn(40)
    net = ps.sparsify(torch.nn.Linear(2, 1, bias=False), ps.SpikeSlab(0.5, 1e-5, 1.0))

    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", 40):
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    no_step = ps.PriorAnnealing(0, 0, 0, 1, learning_rate=1e-12, temperature=0.0)
    run = ps.anneal(model, (x, y), no_step, num_draws=1, progress=False)
    fit = ps.refit(run, ps.select(run), tolerance=1e-6)
    law = dist.MultivariateNormal(torch.zeros(40).double(), x.double() @ x.double().T + torch.eye(40).double())
    # The noise variance of the covariance is estimated, here 1 in truth: that is the difference allowed.
    allowed = abs(math.log(fit.noise_variance)) + 1e-3
    assert abs(evidence.log_evidence(fit) - float(law.log_prob(y.double()))) < allowed


@pytest.mark.parametrize("name", ["mean", "linear", "logistic"])
def test_gradients_and_curvature_are_those_of_the_pyro_model(load: Any, name: str) -> None:
    """By automatic differentiation of its joint density; the exact posterior is then where the gradient vanishes."""
    import pyro

    validity = load("validity")
    given = validity.problem(name, 1)

    def potential(w: torch.Tensor) -> torch.Tensor:
        trace = pyro.poutine.trace(pyro.condition(given.model, {"w": w})).get_trace(*(t.double() for t in given.data))
        return -torch.as_tensor(trace.log_prob_sum())

    w = np.linspace(-0.5, 1.5, 10)
    gradient = given.gradients(w).sum(0) + w  # and that of the prior
    hessian = torch.autograd.functional.hessian(potential, torch.as_tensor(w))
    # The data of the model are in single precision.
    assert torch.autograd.functional.jacobian(potential, torch.as_tensor(w)).numpy() == pytest.approx(
        gradient, rel=1e-4
    )
    assert np.asarray(hessian) == pytest.approx(given.curvature(w), rel=1e-4, abs=1e-2)
    if name != "logistic":
        mean, covariance = validity.posterior(name, given, 1, 1.0, Path())
        assert np.abs(given.gradients(mean).sum(0) + mean).max() < 1e-9
        assert covariance @ np.asarray(hessian) == pytest.approx(np.eye(10), abs=1e-4)


@pytest.mark.parametrize(("friction", "learning_rate"), [(0.1, 0.01), (1.0, 0.2)])
def test_stationary_law_with_permuted_batches(load: Any, friction: float, learning_rate: float) -> None:
    """In closed form without batches, and against a simulation with them: a false alarm in 10,000."""
    stationary = load("validity").stationary
    curvature, variance, epsilon = 800.0, 20.0, learning_rate / 1_000
    full = stationary(curvature, variance, learning_rate, friction, 1_000)
    right = 1 / (1 - epsilon * curvature / (2 * (2 - friction)))  # times 1 / curvature, as the stability warning says
    assert full[0, 0] * curvature == pytest.approx(right)
    assert full[1, 1] * (1 - friction / 2) / epsilon == pytest.approx(right)  # kinetic as configurational

    rng = np.random.default_rng(0)
    position, momentum, squares = np.zeros(20_000), np.zeros(20_000), []
    for epoch in range(60):
        error = rng.standard_normal((5, 20_000)) * (variance / 200) ** 0.5
        for own in error - error.mean(0):
            noise = (2 * friction * epsilon) ** 0.5 * rng.standard_normal(20_000)
            momentum = (1 - friction) * momentum - learning_rate * (curvature / 1_000 * position + own) + noise
            position = position + momentum
            squares += [(position**2, momentum**2)] if epoch == 59 else []
    law = stationary(curvature, variance, learning_rate, friction, 200)
    means = np.mean(squares, 0)  # (2, chains): a chain's five steps count as one
    within = 4 * means.std(1) / 20_000**0.5
    assert (np.abs(means.mean(1) - np.diag(law)) < within).all()
    assert law[0, 0] > full[0, 0] + within[0]  # batches can be told


def test_errors_of_draws_that_are_moved_and_too_wide(load: Any) -> None:
    """Twice as wide and half a standard deviation aside: of the second moment about the truth 4 + 1/4 is left."""
    covariance = np.array([[4.0, 1.0], [1.0, 1.0]])
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4, 20_000, 2)) @ np.linalg.cholesky(4 * covariance).T + 7
    found = load("validity").errors(draws + 0.5 * np.array([2.0, 1.0]), np.full(2, 7.0), covariance)
    assert found["mean_bias"] == pytest.approx(0.5, abs=5 * 2 / 80_000**0.5)
    assert found["sd_bias"] == pytest.approx(4.25**0.5 - 1, abs=0.03)
    shift = np.array([1.0, 0.5])
    right = 4 + shift @ np.linalg.solve(covariance, shift) / 2 - 1
    assert found["excess"] == pytest.approx(right, abs=0.1) and 0 < found["excess_error"] < 0.1
    assert 0 < found["mean_noise"] < 0.05
    one = load("validity").errors(
        draws[..., :1], np.full(1, 7.0), covariance[:1, :1]
    )  # of one weight both errors are one
    assert one["sd_error"] == pytest.approx(one["excess_error"] / (2 * (1 + one["sd_bias"])))
    assert (
        0.2 < one["mean_noise"] / (2 / 80_000**0.5) < 2.2
    )  # four chains: chi-square of 3, a false alarm in 1,000 or so


def test_validity_runs_and_goes_on(load: Any, tmp_path: Path) -> None:
    """A sampler each against a reference, and a path: rows that are made once, a table and a picture."""
    validity, common = load("validity"), load("common")
    output = tmp_path / "validity.jsonl"
    for _ in range(2):
        for sampler in ("NUTS", "SGHMC"):
            validity.run("logistic", sampler, 0.1, 200, 1, 0.002, output)
        validity.path("0.2 t^(-1/3)", 1, 0.01, output)
    rows = common.read_rows(output)
    assert [row["kind"] for row in rows] == ["reference", "sampler", "sampler", "path"]
    assert rows[2]["gradients"] == 4 * 8 and all(math.isfinite(row["excess"]) for row in rows[1:3])
    assert abs(rows[3]["bias"][-1]) < 0.5 and rows[3]["steps"][-1] == 2_000
    assert validity.table(rows).count("| SGHMC | 200 | 0.01 |") == 1
    validity.picture(rows, output)
    assert output.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "method, package",
    [
        pytest.param("SIS", "skglm", marks=pytest.mark.slow),  # numba compiles for a quarter of a minute
        ("BART50", "stochtree"),
        ("LassoNet", "lassonet"),
        ("Boosted trees", "sklearn"),
    ],
)
def test_a_rival_runs(load: Any, tmp_path: Path, method: str, package: str) -> None:
    pytest.importorskip(package)  # not optional_import: the extra `benchmarks` is not installed in CI
    table, common = load("regression_table"), load("common")
    table.run(method, 1, 200, 8, 0.01, tmp_path / "rows.jsonl")
    (row,) = common.read_rows(tmp_path / "rows.jsonl")
    assert row["method"] == method and math.isfinite(row["mspe"]) and row["num_selected"] <= 8


def test_runs_on_disk_are_measured_once(load: Any, tmp_path: Path) -> None:
    """Small ones, all in this process; what is there is not made again."""
    runs, rows, output = load("runs"), [], tmp_path / "rows.jsonl"
    for apart in (lambda function, *arguments: function(*arguments), lambda *arguments: pytest.fail("made again")):
        runs.apart = apart
        runs.measure(runs.SMOKE, list(runs.PLANS), 1, str(tmp_path), output)
        rows.append([json.loads(line) for line in output.read_text().splitlines()])
    assert rows[0] == rows[1]
    kinds = [row["kind"] for row in rows[0]]
    assert {kind: kinds.count(kind) for kind in runs.PLANS} == {
        "memory": 4,
        "resume": 2,
        "write": 2,
        "many": 2,
        "read": 2,
    }
    memory, disk = (
        next(row for row in rows[0] if (row["kind"], row.get("kept")) == ("write", k)) for k in ("memory", "disk")
    )
    assert memory["write_cpu"] == 0 < disk["write_cpu"] < disk["total_cpu"]
    assert all(row["steps_per_cpu_second"] > 0 for row in rows[0] if row["kind"] == "resume")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_tables_of_runs_by_hand(load: Any) -> None:
    runs = load("runs")
    shape = {"layers": "4-1", "num_weights": 5, "num_steps": 100, "round": 0}
    memory = [
        shape | {"kind": "memory", "kept": kept, "num_draws": draws, "at_first_step": 90, "steps": peak}
        for kept, draws, peak in (("disk", 10, 100), ("disk", 1_000, 104), ("memory", 10, 100), ("memory", 1_000, 500))
    ]
    assert "| on disk | 100 (+10) | 104 (+14) | 1.040 |" in runs.table(memory).splitlines()
    speeds = [(100, 98), (50, 48), (80, 80)]  # ratios 0.98, 0.96, 1
    resume = [
        shape | {"kind": "resume", "round": n, "run": name, "steps_per_wall_second": v, "steps_per_cpu_second": v}
        for n, pair in enumerate(speeds)
        for name, v in zip(("fresh", "resumed"), pair, strict=True)
    ]
    assert "| a wall second | 80.0 | 80.0 | 0.980 |" in runs.table(resume).splitlines()
    seconds = {"total": 100.0, "write": 1.0, "save": 0.5, "close": 0.25}
    write = [
        shape
        | {"kind": "write", "kept": kept, "num_draws": 1}
        | {f"{name}_{clock}": value * factor for name, value in seconds.items() for clock in ("wall", "cpu")}
        for kept, factor in (("disk", 1), ("memory", 0.98))
    ]
    assert "| cpu | 98.0 | 100.0 | 1.25 % | 0.50 % | 1.75 % |" in runs.table(write).splitlines()


@pytest.mark.parametrize("script", sorted(str(p.relative_to(BENCHMARKS)) for p in BENCHMARKS.rglob("*.py")))
def test_every_script_can_be_imported(load: Any, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """With what they import from each other; the packages of rivals are loaded when they are run."""
    monkeypatch.syspath_prepend(str((BENCHMARKS / script).parent))
    runpy.run_path(str(BENCHMARKS / script), run_name="imported")


def image_task(load: Any, setting: str = "keep", **changed: Any) -> Any:
    settings = {"depth": 8, "keep": 0.1, "seed": 1, "epochs": 12, "width": 2, "precision": "float32"}
    return load("gpu.cifar").Task(setting, **settings | {"erase_prob": 0.5, "batch": 20} | changed)


def test_runs_on_images_are_read_and_named(load: Any) -> None:
    cifar = load("gpu.cifar")
    assert cifar.parsed("20:0.1:1-2,32:0.05:7") == [(20, 0.1, 1), (20, 0.1, 2), (32, 0.05, 7)]
    tasks = [image_task(load, **{name: value}) for name, value in (("seed", 2), ("keep", 0.2), ("erase_prob", 0.0))]
    assert len({task.name for task in [image_task(load), image_task(load, "dense"), *tasks]}) == 5


def test_the_papers_two_readings_of_its_spike(load: Any) -> None:
    """Variances at the end and at the start, of the text and a tenth of them of the scripts."""
    for setting, factor in (("paper-text", 1.0), ("paper-scripts", 0.1)):
        task = image_task(load, setting, depth=20)
        law = task.law
        found = [float(scale) for scale in (law.spike_scale**2, law.initial_spike_scale**2, law.slab_scale**2)]
        assert found == pytest.approx([6e-5 * factor, 6e-4 * factor, 0.04]) and float(law.slab_prob) == pytest.approx(
            1e-9
        )
        assert task.share is None and task.schedule(50_000).last_phase == "sample"
    assert image_task(load).law is None and image_task(load).share == 0.1
    dense = image_task(load, "dense", epochs=300, batch=128).schedule(50_000)
    assert [dense.at(390 * epoch).learning_rate for epoch in (0, 149, 150, 224, 225, 299)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )
    assert dense.num_steps == 390 * 300 and dense.last_phase == "train"
    assert (dense.at(0).weight_decay, dense.at(0).friction, dense.at(0).temperature) == (5e-4, 0.1, 0.0)


def test_the_network_of_images_is_the_librarys_and_its_program_is_fit_for_a_card(load: Any) -> None:
    """Channels last and in bfloat16, where the library's own pooling would set strides in place."""
    import pyro_sparse.inference.program as program
    from pyro_sparse.inference.inspection import inspect, start
    from pyro_sparse.inference.potential import Potential

    cifar = load("gpu.cifar")
    images, labels = cifar.random_data(40, "cpu").train
    net = cifar.network(8, 2, seed=3)
    torch.manual_seed(3)
    right = torch.nn.Sequential(ps.Normalize(cifar.CIFAR10_MEAN, cifar.CIFAR10_STD), ps.resnet(8, width=2))
    assert torch.allclose(cifar.logits_of(net, images, "float32"), right(images), atol=1e-5)
    low = cifar.logits_of(net, images, "bfloat16").detach()
    assert low.dtype == torch.float32 and 1e-5 < float((low - right(images)).abs().max()) < 0.1
    task = image_task(load, "dense", precision="bfloat16")
    spec = inspect(task.model(40, torch.zeros(0)), (images, labels), 20, 0, task.augment)
    batches = spec.batches(0, 0, torch.device("cpu"))
    potential = Potential(spec, start(spec, 0, 0, False), (batches(0), batches(1)))
    assert potential.kind == "traced" and potential.is_halved
    nodes = list(potential.program.graph.nodes)
    assert not [node for node in nodes if program._mutates(node.target)]
    assert not [node for node in nodes if "lift_fresh" in str(node.target)]  # copies of what the host holds


def test_time_that_is_over_interrupts_and_time_that_is_not_does_not(load: Any) -> None:
    cifar = load("gpu.cifar")
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), cifar.interrupted_at(begun + 0.05):
        time.sleep(10)
    assert time.monotonic() < begun + 5  # whatever the process waits for
    with cifar.interrupted_at(time.monotonic() + 0.2):
        pass
    time.sleep(0.4)


def test_measures_of_images_by_hand(load: Any) -> None:
    """Three test images of which the second is wrong and the third all but certain, then two unfamiliar ones."""
    cifar = load("gpu.cifar")
    images = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    data = cifar.Data((images, torch.zeros(3).long()), (images, torch.tensor([0, 0, 1])), images[:2], "made up")
    probs = np.array([[0.8, 0.2], [0.4, 0.6], [0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])
    row = cifar.measures(data, probs)
    assert row["accuracy"] == pytest.approx(2 / 3) and row["nll"] == pytest.approx(-math.log(0.8 * 0.4) / 3)
    assert row["brier"] == pytest.approx((2 * 0.04 + 2 * 0.36) / 3)
    assert (row["test_outside"], row["svhn_outside"]) == (pytest.approx(1 / 3), 0.5)
    assert row["js_distance"] == ps.js_distance(probs[:3], probs[3:])
    assert "js_distance" not in cifar.measures(data, np.tile([[1.0, 0.0]], (5, 1)))


def test_shares_kept_of_all_parameters_and_of_layers(load: Any) -> None:
    """A convolution of 4 x 3 weights and a BatchNorm of 4 + 4, of two draws; buffers do not count."""
    from pyro_sparse.inference.inspection import inspect

    net = ps.sparsify(
        torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1, bias=False), torch.nn.BatchNorm2d(4)), ps.SpikeSlab(0.1, 0.1, 1.0)
    )

    def model(x: torch.Tensor) -> None:
        import pyro
        import pyro.distributions as dist

        mean = net(x).mean((1, 2, 3))
        with pyro.plate("rows", 8, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.zeros(len(x)))

    spec = inspect(model, torch.randn(8, 3, 2, 2), 4, 0)
    kept = torch.zeros(2, spec.layout.num_coordinates, dtype=torch.bool)
    kept[0, :6], kept[1, :14] = True, True
    kept[:, -8:] = True  # running means and variances
    run = type("Run", (), {"spec": spec})
    found = load("gpu.cifar").kept_shares(run, kept)
    assert found == {"kept": pytest.approx((6 + 14) / 40), "kept_of_layers": pytest.approx((6 + 12) / 24)}


def made_up_rows(predictor: str, **changed: Any) -> dict[str, Any]:
    row = {"kind": "predicted", "smoke": False, "card": "a card", "data": "torchvision", "setting": "keep", "depth": 20}
    row |= {
        "keep": 0.1,
        "seed": 1,
        "width": 16,
        "epochs": 300,
        "precision": "bfloat16",
        "erase_prob": 0.5,
        "train_rows": 50_000,
    }
    row |= {"svhn_rows": 26_032, "predictor": predictor, "kept": 0.1, "accuracy": 0.92, "nll": 0.25, "ece": 0.01}
    return row | {"js_distance": 9.0} | changed


def test_the_table_of_images_by_hand(load: Any, tmp_path: Path) -> None:
    """Means over seeds beside the paper's rows; of a figure that was measured twice the last; lines for what departs."""
    table, common = load("cifar_table"), load("common")
    rows = [
        made_up_rows("average", accuracy=0.5),
        made_up_rows("average", kept=0.0996, accuracy=0.92),
        made_up_rows("average", seed=2, kept=0.1004, accuracy=0.93, nll=0.27),
        made_up_rows("average", epochs=100, accuracy=0.91, svhn_rows=10_000),
        made_up_rows("anneal", depth=32, keep=0.05, erase_prob=0.0),
        made_up_rows("dense", setting="dense", keep=1.0, kept=1.0, accuracy=0.931),
        made_up_rows("DPF", setting="DPF", accuracy=0.9, seconds_an_epoch=2.0, num_trainings=1, state_mib=8.0),
        made_up_rows("anneal", setting="paper-text", kept=0.3),
        made_up_rows("average", smoke=True, seed=3, accuracy=0.1),
        {"kind": "done", "smoke": False, "card": "a card"},
    ]
    for row in rows:
        common.append_row(tmp_path / "gpu_cifar_1.jsonl", row)
    found = table.measured(tmp_path)
    assert len(found) == 8
    lines = table.report(found, [1, 2]).splitlines()
    own = "| **average over sparse draws** | - | 92.50 (0.71) [10.00 (0.06)] | - | - |"
    assert lines[lines.index(own) + 2].startswith("| BNN_average, paper | 92.53 [19.85] | 91.65 [9.88] |")
    assert "| **average over sparse draws, 100 epochs** | - | 91.00 [10.00] | - | - |" in lines
    assert "| **selected and refitted, erasing 0.0** | - | - | - | 92.00 [10.00] |" in lines
    assert "| **dense** | 93.10 | 93.10 | - | - |" in lines
    rival = "| **DPF** | - | 90.00 [10.00] | - | - |"
    assert lines[lines.index(rival) + 1].startswith("| DPF, paper | 92.17 | 90.88 |")
    assert "| ResNet-20, DPF, 10 %, seed 1 | a card | bfloat16 | 1 | 2.000 | 8.0 | - |" in lines
    assert "| **average over sparse draws** | - | 0.2600 (0.0141) / 9.00 (0.00) / 0.0100 (0.0000) | - | - |" in lines
    assert "| as the text has them, selected and refitted | - | 92.00 [30.00] | - | - |" in lines
    assert sum("10000 images of SVHN" in line for line in lines) == 1
    start = "python benchmarks/gpu/cifar.py --setting"
    commands = [line for line in lines if line.startswith(start)]
    assert commands[1] == f"{start} dense --runs 32:1:1,20:1:2,32:1:2 --stages run --data DIR --folder RUNS"
    assert commands[2].startswith(f"{start} paper-text --runs 20:0.2:1,32:0.1:1,32:0.05:1,20:0.2:2,20:0.1:2")
    # An average alone is no full set of predictors, and 300 epochs without erasing are not the paper's.
    assert commands[0].startswith(f"{start} keep --runs 20:0.2:1,20:0.1:1,32:0.1:1,32:0.05:1,20:0.2:2")
    assert "no card yet" in table.report([], [1]) and table.report([], [1]).count(start) == 4
    rivals = [line for line in lines if line.startswith("python benchmarks/gpu/cifar_rivals.py --methods")]
    assert len(rivals) == 7 and '"DPF" --runs 20:0.2:1,32:0.1:1,32:0.05:1,20:0.2:2,20:0.1:2' in rivals[3]
    assert '"SWAG" --runs 20:1:1,32:1:1,20:1:2,32:1:2 --data DIR' in rivals[6]


def test_the_table_of_images_reads_the_rivals_and_has_the_papers_numbers(load: Any, tmp_path: Path) -> None:
    table, common = load("cifar_table"), load("common")
    cost = {"seconds_an_epoch": 2.0, "num_trainings": 1, "state_mib": 8.0, "peak_gib": 1.256}
    dense = made_up_rows("dense", setting="dense", keep=1.0, kept=1.0, accuracy=0.8)
    swag = made_up_rows("SWAG", setting="SWAG", keep=1.0, kept=1.0, accuracy=0.7, **cost)
    common.append_row(tmp_path / "gpu_rivals.jsonl", swag)
    common.append_row(tmp_path / "gpu_rivals.jsonl", swag | {"kind": "failed", "seed": 2})
    common.append_row(tmp_path / "gpu_rivals.jsonl", dense | cost)
    common.append_row(tmp_path / "gpu_cifar.jsonl", dense | {"accuracy": 0.9})
    lines = table.report(table.measured(tmp_path), [1]).splitlines()
    assert "| **dense** | 80.00 | 80.00 | - | - |" in lines  # that of gpu/cifar_rivals.py
    assert "| **SWAG** | 70.00 | 70.00 | - | - |" in lines
    assert (
        sum(
            line.startswith("| ResNet-20, SWAG, seed 1 | a card | bfloat16 | 1 | 2.000 | 8.0 | 1.26 |")
            for line in lines
        )
        == 1
    )
    narrow = made_up_rows("DPF", setting="DPF", width=8, accuracy=0.6, drops="0.75")
    common.append_row(tmp_path / "gpu_rivals.jsonl", narrow)
    assert "**DPF, width 8, rates as ours** | - | 60.00" in table.report(table.measured(tmp_path), [1])
    assert table.ACCURACY["SM"] == ("91.54", "89.76", "91.54", "88.68")
    assert table.ACCURACY["DSR"] == ("91.78", "87.88", "91.41", "84.12")
    assert table.ACCURACY["DPF"] == ("92.17", "90.88", "92.42", "90.94")
    assert table.ACCURACY["BNN_BIC"] == ("92.27", "91.27", "92.74", "91.21")


def test_rates_and_phases_of_the_ablation_on_images(load: Any) -> None:
    """By twentieths of the run; all that a variant does not change stays."""
    ablation = load("image_ablation")
    usual = ps.PriorAnnealing.images(10, 60)
    changed = {name: variant.schedule(usual) for name, variant in ablation.VARIANTS.items()}
    rates = {name: [it.at(step).learning_rate for step in range(0, 600, 30)] for name, it in changed.items()}
    paper = ps.PriorAnnealing.paper_cifar(10, 60, sample=True)
    right = [paper.at(step).learning_rate for step in range(0, 600, 30)]
    assert rates["the paper's rates: 0.01 from 1/2, 0.001 from 3/4"] == pytest.approx(right)
    assert rates["rate 0.01 from 1/2"] == pytest.approx([0.1] * 10 + [0.01] * 10)
    assert rates["rate 0.001 from 3/4"] == pytest.approx([0.1] * 15 + [0.001] * 5)
    assert rates["cosine rate"][0] == 0.1 and rates["cosine rate"][15:] == pytest.approx([0.01] * 5)
    assert rates["cosine rate"][10] == pytest.approx(0.055 - 0.045 / 2)  # two thirds of the way: cos(2 pi / 3) = -1/2
    assert rates["rate warmed up"] == pytest.approx([0.0, *rates["default"][1:]])
    lengths = [changed["phases 0.3, 0.35, 0.13, 0.22"].length(phase) for phase in PHASES]
    assert lengths == [180, 210, 78, 0, 132]
    for name, schedule in changed.items():
        assert schedule.num_steps == usual.num_steps, name
        if "phases" not in name and "temperature" not in name:
            assert all(schedule.at(step)[1:] == usual.at(step)[1:] for step in range(0, 600, 7)), name


def test_as_many_weights_are_kept_where_biases_and_batchnorm_have_a_flat_prior(load: Any) -> None:
    ablation, cifar = load("image_ablation"), load("gpu.cifar")
    task = image_task(load, width=4)
    sizes = {name: part.numel() for name, part in cifar.network(8, 4, 1).named_parameters()}
    total, flat = sum(sizes.values()), sum(size for name, size in sizes.items() if "bn" in name or "bias" in name)
    shares = [
        ablation.model_of(task, ablation.VARIANTS[n], 99)[1] for n in ("default", "flat prior on biases and BatchNorm")
    ]
    assert shares[0] == pytest.approx(0.1) and 0 < flat < total / 10
    assert shares[1] * (total - flat) + flat == pytest.approx(0.1 * total)


def test_the_table_of_the_ablation_on_images_by_hand(load: Any) -> None:
    """Gains are of the seeds that the default has too, and of the two predictors whose running statistics are right."""
    ablation = load("image_ablation")

    def row(variant: str, seed: int, accuracy: float, *names: str) -> dict[str, Any]:
        one = {"accuracy": accuracy, "nll": 1.0, "ece": 0.02, "kept": 0.1 if "refit" in names else 1.0}
        return {"variant": variant, "seed": seed, "epochs": 36, "cpu_seconds": 100.0} | dict.fromkeys(names, one)

    names = tuple(ablation.PREDICTORS)
    rows = [row("default", 1, 0.5, *names), row("default", 2, 0.6, *names), row("dense, SGD", 1, 0.7, "whole")]
    rows += [row("cosine rate", 1, 0.52, *names), row("cosine rate", 3, 0.56, *names)]
    rows[3]["refit"] = rows[3]["refit"] | {"accuracy": 0.53}
    title, _, *lines = ablation.table([*rows, row("default", 1, 0.9, *names) | {"epochs": 72}]).splitlines()
    cell = "55.0 / 1.000 / 0.020"
    assert lines[2] == f"| default | 2 | {' | '.join([cell] * 4)} | +0.0, +0.0 | 10.0 | 100 |"
    assert lines[3] == "| dense, SGD | 1 |  |  |  | 70.0 / 1.000 / 0.020 |  | 100.0 | 100 |"
    assert lines[4].startswith("| cosine rate | 2 | 54.0 / ") and lines[4].endswith("| +2.5 | 10.0 | 100 |")
    assert title == "**36 epochs**" and lines[5:8] == ["", "**72 epochs**", ""]
    assert lines[10].startswith("| default | 1 | 90.0 / ") and len(lines) == 11


@pytest.mark.slow
def test_the_ablation_on_images_runs_and_makes_no_row_twice(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCHMARKS / "image_ablation.py"), "--smoke", "--output", str(output), "--variants"]
    subprocess.run([*command, "dense, SGD"], check=True, capture_output=True)
    chosen = ("dense, SGD", "cosine rate", "flat prior on biases and BatchNorm")
    subprocess.run([*command, *chosen], check=True, capture_output=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["variant"] for row in rows] == list(chosen) and "average" not in rows[0]
    for row in rows[1:]:
        assert 0.05 < row["refit"]["kept"] < 0.3 and 0.05 < row["average"]["kept"] < 0.3  # so few steps reach no share
    assert (tmp_path / "rows.md").read_text().count("\n") == 7


def smoke(script: str, output: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of a script for a card, run on the CPU."""
    command = [sys.executable, str(BENCHMARKS / "gpu" / script), "--smoke", "--device", "cpu", "--output", str(output)]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_the_regression_for_a_card_runs_on_the_cpu(tmp_path: Path) -> None:
    rows = smoke("regression.py", tmp_path / "rows.jsonl")
    assert [row["stage"] for row in rows] == ["reference", "step", "annealed", "done"]
    assert rows[0]["largest_difference"] < 1e-4 and rows[-1]["network"] == "20-30-10-5-1" and "mspe" in rows[-1]


@pytest.mark.skipif(shutil.which("c++") is None, reason="compiling on a CPU needs a C++ compiler")
def test_the_step_for_a_card_runs_on_the_cpu(tmp_path: Path) -> None:
    rows = smoke("step.py", tmp_path / "rows.jsonl")
    assert [row["kind"] for row in rows] == ["ceilings", "precision"] + 5 * ["step"]
    assert rows[1]["float32"] < 1e-5 < rows[1]["bfloat16"] < 0.1
    methods = ["SGD", "foreach", "plain", "graph", "compiled graph"]
    assert [row["method"] for row in rows[2:]] == methods and all(row["milliseconds"] > 0 for row in rows[2:])


@pytest.mark.slow
def test_the_images_for_a_card_run_on_the_cpu(tmp_path: Path) -> None:
    rows = smoke("cifar.py", tmp_path / "rows.jsonl", "--folder", str(tmp_path / "runs"), "--precision", "bfloat16")
    kinds = ["check", "epoch", "epoch", "annealed", *["predicted"] * 4, "done"]
    assert [row["kind"] for row in rows] == kinds
    assert rows[0]["float32"] < 1e-4 < rows[0]["bfloat16"] < 0.05 and rows[0]["program"] == "traced"
    assert [row["predictor"] for row in rows[4:8]] == ["average", "anneal", "refreshed", "whole"]
    again = smoke(
        "cifar.py",
        tmp_path / "rows.jsonl",
        "--folder",
        str(tmp_path / "runs"),
        "--precision",
        "bfloat16",
        "--stages",
        "run",
    )
    assert again == rows  # what is there is not made again
    dense = smoke(
        "cifar.py",
        tmp_path / "dense.jsonl",
        "--folder",
        str(tmp_path / "runs"),
        "--setting",
        "dense",
        "--stages",
        "run",
    )
    assert [row["kind"] for row in dense] == ["annealed", "predicted", "done"] and dense[1]["kept"] == 1
    late = smoke(
        "cifar.py",
        tmp_path / "late.jsonl",
        "--folder",
        str(tmp_path / "late"),
        "--stages",
        "run",
        "--minutes",
        "0.0001",
    )
    assert [row["kind"] for row in late] == ["left"]


@pytest.mark.slow
@needs_data
def test_real_images_are_learned_by_a_tenth_of_the_weights_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """5,000 of them, a narrow network of eight layers, 12 epochs: far from the tables, but all of the way there."""
    output, runs = tmp_path / "rows.jsonl", tmp_path / "runs"
    command = [sys.executable, str(BENCHMARKS / "gpu" / "cifar.py"), "--smoke", "--device", "cpu", "--no-erasing"]
    command += ["--data", str(DATA), "--rows", "5000", "--width", "8", "--stages", "run", "--minutes", "60"]
    command += ["--folder", str(runs), "--output", str(output)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while first.poll() is None and not list(runs.glob("*/.checkpoint.npz")):
        time.sleep(0.5)
    first.send_signal(signal.SIGINT)
    assert first.wait() == 0
    subprocess.run(command, check=True, capture_output=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["stopped", "annealed", *["predicted"] * 4, "done"]
    assert "resume=True goes on" in rows[0]["stopped"] and rows[1]["resumed"]
    for row in rows[2:6]:
        wanted = 1.0 if row["predictor"] == "whole" else 0.1
        assert row["kept"] == pytest.approx(wanted, abs=0.003), row["predictor"]
        assert 0 < row["nll"] < 3 and 0 <= row["brier"] <= 2 and 0 < row["ece"] < 0.5 and row["js_distance"] > 0
        assert row["test_rows"] == row["svhn_rows"] == 2_500 and row["test_outside"] == row["svhn_outside"] == 0
    accuracy = {row["predictor"]: row["accuracy"] for row in rows[2:6]}
    assert min(accuracy[name] for name in ("anneal", "refreshed", "whole")) > 0.3, accuracy
