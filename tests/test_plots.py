"""Every picture: that it can be drawn, from a little to a lot, and that it shows the numbers it was given."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import nn

import pyro_sparse as ps
from pyro_sparse import plots
from pyro_sparse.estimators import SparseClassifier
from pyro_sparse.inference.run import Run

SCHEDULE = ps.PriorAnnealing(10, 20, 40, 30, learning_rate=1e-3)


def regression(net: Callable[..., Any], num_data: int) -> Callable[..., Any]:
    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        mean = net(x).squeeze(-1)
        with pyro.plate("data", num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    return model


def run_of(net: Callable[..., Any], num_inputs: int, num_chains: int = 1, names: list[str] | None = None) -> Run:
    x = torch.randn(60, num_inputs)
    y = 2 * x[:, 0]
    return ps.anneal(regression(net, 60), (x, y), SCHEDULE, 30, 10, num_chains, input_names=names, progress=False)


@pytest.fixture(scope="module")
def run() -> Run:
    torch.manual_seed(0)
    return run_of(ps.SparseNet([4, 5, 3, 1]), 4, num_chains=2)


def structure_with(run: Run, **kept: list[tuple[int, int]]) -> ps.Structure:
    """A structure with the given weights of each layer at 1 and no other."""
    masks = {name: torch.zeros_like(mask) for name, mask in ps.select(run).masks.items()}
    for layer, places in kept.items():
        for place in places:
            masks[f"{layer}.weight"][place] = True
    values = {name: mask.float() for name, mask in masks.items()}
    reads = masks["layer1.weight"].any(0)
    return ps.Structure(masks, values, reads.float(), reads, None, 1, run.spec.layout)


def saved(figure: Figure, folder: Path) -> int:
    figure.savefig(folder / "picture.png")
    assert (folder / "picture.png").read_bytes()[:4] == b"\x89PNG"
    return (folder / "picture.png").stat().st_size


def axes_labelled(figure: Figure, label: str) -> Any:
    return next(axes for axes in figure.axes if axes.get_ylabel() == label)


def texts(figure: Figure) -> str:
    """Everything that is written in the picture."""
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def diagnosis(r_hat: float, num_chains: int = 4) -> ps.Diagnosis:
    names = [f"mean[{row}]" for row in range(20)] + ["log_likelihood", "num_included", "input[0]", "projection[0]"]
    number = len(names)
    table = xr.Dataset(
        {
            "mean": ("quantity", np.zeros(number)),
            "sd": ("quantity", np.ones(number)),
            "r_hat": ("quantity", [*np.linspace(1.0005, 1.2, number - 2), r_hat, np.nan]),
            "ess_bulk": ("quantity", np.linspace(150, 2_000, number)),
            "ess_tail": ("quantity", np.linspace(300, 1_000, number)),
        },
        coords={"quantity": names},
    )
    columns = {"kinetic": 1.1, "configurational": 1.2, "kinetic_se": 0.03, "configurational_se": 0.02, "nominal": 1.0}
    heat = xr.Dataset(
        {name: ("chain", np.full(num_chains, value)) for name, value in columns.items()},
        coords={"chain": np.arange(num_chains)},
    )
    return ps.Diagnosis(table, heat, "Not mixing: R-hat of mean[3] is 1.20; raise sample_steps or num_chains.")


@pytest.mark.parametrize(("r_hat", "num_chains"), [(1.2, 4), (np.inf, 1)])
def test_diagnosis_shows_every_quantity_and_both_temperatures(r_hat: float, num_chains: int, tmp_path: Path) -> None:
    found = diagnosis(r_hat, num_chains)
    figure = plots.plot_diagnosis(found)
    panels = {axes.get_xlabel(): axes for axes in figure.axes}
    shown = np.asarray(panels["R-hat"].collections[0].get_offsets())
    assert len(shown) == 23 and np.allclose(shown[:, 0], np.clip(found.table["r_hat"][:-1] - 1, 1e-4, 1))
    assert [label.get_text() for label in panels["R-hat"].get_yticklabels()] == [
        "mean",
        "log likelihood",
        "num included",
        "input",
    ]
    assert found.verdict in texts(figure).replace("\n", " ")
    heat = panels["chain"]
    assert [line.get_ydata()[0] for line in heat.lines if len(line.get_ydata()) == num_chains][:2] == [1.1, 1.2]
    assert saved(figure, tmp_path) > 5_000


@pytest.mark.parametrize(
    "schedule",
    [
        ps.PriorAnnealing(),
        ps.PriorAnnealing(0, 0, 0, 0, 500),
        ps.PriorAnnealing(0, 3, 5, 1, 2, learning_rate_drops=(4,)),
        ps.PriorAnnealing.paper_cifar(100),
    ],
)
def test_schedule_and_prior(schedule: ps.PriorAnnealing, tmp_path: Path) -> None:
    prior = ps.SpikeSlab(1e-7, 3e-3, 0.3, 3e-2)
    figure = plots.plot_schedule(schedule, prior.expand([3, 2]))
    assert saved(figure, tmp_path) > 20_000
    power, spike, heat = (axes_labelled(figure, label) for label in ("prior power η", "weight", "temperature τ"))
    steps, shown = power.lines[0].get_data()
    assert list(shown) == [schedule.at(int(step)).prior_power for step in steps]
    assert list(heat.lines[0].get_ydata()) == [schedule.at(int(step)).temperature for step in steps]
    thresholds = [float(prior.at(schedule.at(int(step)).spike_progress).inclusion_threshold) for step in steps]
    assert list(spike.lines[1].get_ydata()) == pytest.approx(thresholds, rel=1e-5)


def test_schedule_shows_both_sides_of_a_jump() -> None:
    schedule = ps.PriorAnnealing(10_000, 0, 0, 7, 100_000, learning_rate_drops=(5_003,))
    steps = plots._sampled_steps(schedule)
    assert {5_002, 5_003, 9_999, 10_000, 10_007} <= set(steps)


def test_annealing_has_a_line_for_each_chain(run: Run, tmp_path: Path) -> None:
    figure = plots.plot_annealing(run)
    assert saved(figure, tmp_path) > 10_000
    kept = figure.axes[1]
    assert len(kept.lines) == 2
    assert list(kept.lines[1].get_ydata()) == run.history["num_kept"].values[1].tolist()
    assert all(phase in texts(figure) for phase in ("train", "power", "spike", "cool"))


def test_annealing_asks_for_a_history(run: Run) -> None:
    empty = run.history.isel(chain=slice(0), step=slice(0))
    with pytest.raises(
        ValueError, match="run must have a history to be plotted, got none: the run's folder has no check"
    ):
        plots.plot_annealing(replace(run, history=empty))


def test_many_chains_have_colours_of_their_own(run: Run) -> None:
    five = run.history.isel(chain=[0, 1, 0, 1, 0])
    kept = plots.plot_annealing(replace(run, history=five)).axes[1]
    assert len({line.get_color() for line in kept.lines}) == 5


def test_inclusion_of_one_run_counts_weights(run: Run, tmp_path: Path) -> None:
    structure = structure_with(run, layer1=[(0, 1), (2, 1), (1, 3)])
    figure = plots.plot_inclusion(structure)
    assert saved(figure, tmp_path) > 3_000
    bars = figure.axes[0].patches
    assert [bar.get_width() for bar in bars] == [2, 1, 0, 0]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["x1", "x3", "x0", "x2"]
    assert "2 of 4 inputs selected" in texts(figure)


def test_inclusion_of_levels_is_that_of_their_input(run: Run) -> None:
    structure = structure_with(run, layer1=[(0, 1), (2, 2)])
    figure = plots.plot_inclusion(structure, ["size", "colour", "colour", "colour"])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["colour", "size"]
    assert [bar.get_width() for bar in figure.axes[0].patches] == [2, 0]


def test_runs_that_choose_different_levels_choose_their_input() -> None:
    """Red in the first run, blue in the second: the colour in both."""
    estimator = ps.SparseRegressor()
    estimator.n_features_in_, estimator.columns_, estimator.fits_ = 4, np.array([], dtype=int), []
    estimator.supports_ = np.array([[True, True, False, False], [False, False, True, False]])
    figure = plots.plot_inclusion(estimator, ["size", "colour", "colour", "colour"])
    bars = zip(figure.axes[0].get_yticklabels(), figure.axes[0].patches, strict=True)
    assert {label.get_text(): bar.get_width() for label, bar in bars} == {"colour": 1.0, "size": 0.5}


def test_inclusion_of_several_runs_is_a_share(run: Run, tmp_path: Path) -> None:
    probabilities = ps.mipp(run)
    for source in (probabilities, ps.select(run)):
        figure = plots.plot_inclusion(source)
        assert saved(figure, tmp_path) > 3_000
        widths = sorted(bar.get_width() for bar in figure.axes[0].patches)
        assert widths == sorted(probabilities["input"].values.tolist())
        assert "share of 2 runs" in texts(figure)


def test_many_inputs_and_none_selected(tmp_path: Path) -> None:
    names = [f"a name that is far too long for a picture, {i}" for i in range(100)]
    wide = run_of(ps.SparseNet([100, 3, 1]), 100, names=names)
    structure = structure_with(wide)
    figure = plots.plot_inclusion(structure, names)
    assert saved(figure, tmp_path) > 3_000 and "0 of 100 inputs selected" in texts(figure)
    assert max(len(label.get_text()) for label in figure.axes[0].get_yticklabels()) <= plots.MAX_NAME
    constant = plots.plot_network(structure)
    assert constant is not None and saved(constant, tmp_path) > 1_000 and "constant" in texts(constant)


@pytest.mark.parametrize("count", [1, 12, 5_000])
def test_intervals_state_coverage_and_width(count: int, tmp_path: Path) -> None:
    mean = np.random.default_rng(0).normal(size=count)
    table = pd.DataFrame({"mean": mean, "lower": mean - 1, "upper": mean + 1})
    observed = mean + np.where(np.arange(count) % 4 == 0, 3, 0.5)
    figure = plots.plot_intervals(table, observed, 0.9, "mg per l")
    assert saved(figure, tmp_path) > 5_000
    assert f"90% intervals cover {np.mean(np.arange(count) % 4 != 0):.1%} of {count:,} rows, mean width 2" in texts(
        figure
    )
    covered, missed = (len(points.get_offsets()) for points in figure.axes[0].collections[1:])
    assert covered + missed == min(count, plots.MAX_ROWS)
    assert figure.axes[0].get_ylabel() == "mg per l"


def effects_of(count: int, classes: list[str] | None = None, values: int = 15) -> pd.DataFrame:
    """Straight lines of growing slope, of each class another."""
    parts = []
    for number in range(count):
        for k, label in enumerate(classes or [""]):
            value = np.linspace(0.0, 1.0, values)
            mean = (number + 1) * value * (-1) ** k / (k + 1)
            part = {"input": f"x{number}", "value": value, "mean": mean}
            part |= {"mean_lower": mean - 0.5, "mean_upper": mean + 1}
            parts.append(pd.DataFrame(part | ({"class": label} if classes else {})))
    return pd.concat(parts)


def drawn(figure: Figure) -> dict[str, Any]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_effects_have_a_panel_each_with_line_band_and_deciles(tmp_path: Path) -> None:
    data = pd.DataFrame({"x0": np.linspace(0, 1, 101), "x1": np.linspace(0, 1, 101) ** 2})
    figure = plots.plot_effects(effects_of(2), data, "cost in $")
    assert figure is not None and saved(figure, tmp_path) > 5_000
    panels = drawn(figure)
    assert list(panels) == ["x1", "x0"]  # the steeper first
    line, rug = panels["x1"].lines
    assert list(line.get_ydata()) == pytest.approx(list(2 * np.linspace(0, 1, 15)))
    assert list(rug.get_xdata()) == pytest.approx([(i / 10) ** 2 for i in range(1, 10)])
    heights = panels["x1"].collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((-0.5, 3.0))
    assert panels["x1"].get_ylabel() == r"mean of cost in \$" and panels["x0"].get_ylabel() == ""
    assert panels["x0"].get_ylim() == panels["x1"].get_ylim()


def test_effects_of_levels_and_of_two_values_are_dots(tmp_path: Path) -> None:
    effects = effects_of(2, values=2).astype({"value": object})
    effects.loc[effects["input"] == "x0", "value"] = ["light grey", "green"]
    figure = plots.plot_effects(effects)
    assert figure is not None and saved(figure, tmp_path) > 3_000
    panels = drawn(figure)
    assert [label.get_text() for label in panels["x0"].get_xticklabels()] == ["light grey", "green"]
    assert [label.get_text() for label in panels["x1"].get_xticklabels()] == ["0", "1"]
    (bars,) = panels["x1"].containers
    assert list(bars[0].get_ydata()) == [0, 2]
    ends = [segment[:, 1].tolist() for segment in bars[2][0].get_segments()]
    assert ends == [[-0.5, 1], [1.5, 3]]


def test_effects_on_classes(tmp_path: Path) -> None:
    pair = plots.plot_effects(effects_of(1, ["no", "yes"]))
    assert pair is not None and len(pair.axes[0].lines) == 1 and pair.axes[0].get_ylabel() == "P(yes)"
    assert pair.axes[0].lines[0].get_ydata()[-1] == -0.5
    many = plots.plot_effects(effects_of(3, list("abcdefg")))
    assert many is not None and saved(many, tmp_path) > 5_000
    assert all(len(axes.lines) == 5 for axes in many.axes) and many.axes[0].get_ylabel() == "probability"
    assert [text.get_text() for text in many.legends[0].get_texts()] == list("abcde")


def test_effects_of_many_inputs_and_of_none(tmp_path: Path) -> None:
    figure = plots.plot_effects(effects_of(20))
    assert figure is not None and saved(figure, tmp_path) > 20_000
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"x{i}" for i in range(19, 7, -1)]
    assert "12 of 20 selected inputs" in texts(figure)
    assert plots.plot_effects(effects_of(1).iloc[:0]) is None


def test_calibration_counts_rows_in_bins(tmp_path: Path) -> None:
    p = np.array([0.02, 0.04, 0.55, 0.58, 0.52, 1.0])
    observed = np.array(["no", "yes", "yes", "yes", "no", "yes"])
    figure = plots.plot_calibration(np.column_stack([1 - p, p]), observed, ["no", "yes"])
    assert saved(figure, tmp_path) > 5_000
    share, count = figure.axes
    points = np.asarray(share.collections[1].get_offsets())
    assert points[:, 0] == pytest.approx([0.03, 0.55, 1.0]) and points[:, 1] == pytest.approx([0.5, 2 / 3, 1.0])
    assert [bar.get_height() for bar in count.patches] == [2, 0, 0, 0, 0, 3, 0, 0, 0, 1]
    bars = [segment[:, 1].tolist() for segment in share.collections[0].get_segments()]
    assert bars[0] == pytest.approx([0.01258, 0.98742], abs=1e-5)  # Clopper and Pearson, 1 of 2
    assert bars[2] == pytest.approx([0.025, 1.0])
    assert share.get_ylabel() == "observed share of yes"


def test_calibration_of_several_classes_takes_all(tmp_path: Path) -> None:
    p = np.random.default_rng(0).dirichlet(np.ones(3), 50)
    figure = plots.plot_calibration(p, np.arange(50) % 3, [0, 1, 2])
    assert saved(figure, tmp_path) > 5_000 and "50 unseen rows, all classes" in texts(figure)
    assert sum(bar.get_height() for bar in figure.axes[1].patches) == 150


def three_rows_apart() -> tuple[np.ndarray[Any, Any], list[int]]:
    """Three in (0.8, 0.867], of which two are right, and one at 1, which is."""
    probs = np.array([[0.81, 0.19], [0.83, 0.17], [0.16, 0.84], [0.0, 1.0]])
    return probs, [0, 1, 1, 1]


def test_reliability_shows_bins_gaps_and_rows(tmp_path: Path) -> None:
    probs, labels = three_rows_apart()
    figure = plots.plot_reliability({"net": probs}, labels)
    assert saved(figure, tmp_path) > 5_000
    accuracy, gap, count = figure.axes
    said, seen = accuracy.lines[1].get_data()
    assert said == pytest.approx([2.48 / 3, 1.0]) and seen == pytest.approx([2 / 3, 1.0])
    between = [segment[:, 1].tolist() for segment in accuracy.collections[0].get_segments()]
    assert between[0] == pytest.approx([2.48 / 3, 2 / 3])
    place, missing = gap.lines[1].get_data()
    assert missing == pytest.approx([2 / 3 - 2.48 / 3, 0.0]) and place == pytest.approx([12.5 / 15, 14.5 / 15])
    ends = [segment[:, 1].tolist() for segment in gap.collections[0].get_segments()]
    assert ends[0] == pytest.approx([0.09430 - 2.48 / 3, 0.99160 - 2.48 / 3], abs=1e-5)  # Clopper and Pearson, 2 of 3
    assert gap.get_ylim()[1] >= max(map(max, ends)) and gap.get_ylim()[0] <= min(map(min, ends))
    assert [bar.get_height() for bar in count.patches] == [0] * 12 + [3, 0, 1]
    assert accuracy.get_xlim() == gap.get_xlim() == count.get_xlim() and count.get_xlim()[0] < 0.81
    assert accuracy.get_ylim()[0] < 2 / 3 and "4 rows" in texts(figure)


def test_reliability_of_several_predictors_stands_side_by_side(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(3), 400)
    labels = (probs.cumsum(1) > rng.random((400, 1))).argmax(1)
    named = {
        f"number {k} of many predictors": torch.tensor(probs**k / (probs**k).sum(1, keepdims=True)) for k in range(1, 7)
    }
    figure = plots.plot_reliability(named, labels)
    assert saved(figure, tmp_path) > 20_000
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert entries == [
        f"{plots._short(n)}: ECE {ps.ece(p, labels):.4f}, NLL {ps.nll(p, labels):.4f}" for n, p in named.items()
    ]
    lines = [(line.get_color(), line.get_marker()) for line in figure.axes[0].lines[1:]]
    assert len(set(lines)) == 6
    bars = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in figure.axes[2].patches)
    assert len(bars) == 90 and all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(bars))


def test_few_rows_do_not_set_the_scale_of_the_gaps() -> None:
    """One row of 1,001, which is right, has an interval from 0.025 on."""
    probs = np.array([[0.9, 0.1]] * 1_000 + [[0.55, 0.45]])
    figure = plots.plot_reliability({"net": probs}, np.r_[np.arange(1_000) % 10 == 0, 0])
    main, faint = figure.axes[0].lines[1:]
    assert main.get_alpha() is None and faint.get_alpha() == 0.3 and faint.get_linestyle() == "None"
    assert len(main.get_xdata()) == len(faint.get_xdata()) == 1
    assert figure.axes[1].get_ylim() == pytest.approx((-1.1 * 0.45, 1.1 * 0.45))


@pytest.mark.parametrize("predictors", [{}, np.full((3, 2), 0.5)])
def test_reliability_and_entropies_ask_for_names(predictors: Any) -> None:
    for draw in (lambda: plots.plot_reliability(predictors, [0, 1, 1]), lambda: plots.plot_entropies(predictors)):
        with pytest.raises(ValueError, match=f"at least one predictor its name, got {type(predictors).__name__}"):
            draw()


def test_entropies_in_and_out_of_distribution(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inside = np.concatenate([rng.dirichlet(np.full(4, 0.2), 190), np.eye(4)[np.zeros(10, dtype=int)]])
    outside = torch.tensor(rng.dirichlet(np.full(4, 5.0), 50))
    figure = plots.plot_entropies({"dense": (inside, outside), "sparse": (outside, outside)})
    assert saved(figure, tmp_path) > 10_000
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    dense = panels[f"dense: JS-distance {ps.js_distance(inside, outside):.2f} nats"]
    assert "sparse: JS-distance 0.00 nats" in panels
    entropy = -(outside * outside.log()).sum(1).numpy()
    expected = np.histogram(entropy, np.logspace(-8, 0.5, 30))[0] / 50
    values, edges, _ = dense.patches[3].get_data()
    assert values == pytest.approx(expected) and edges == pytest.approx(np.logspace(-8, 0.5, 30))
    colors = [patch.get_edgecolor() for patch in dense.patches[1::2]]
    assert colors == [matplotlib.colors.to_rgba(color) for color in (plots.BLUE, plots.VERMILLION)]
    written = [text.get_text() for text in dense.get_legend().get_texts()]
    unseen = 1 - dense.patches[1].get_data().values.sum()
    assert written == [f"in distribution, 200 rows, {unseen:.1%} not shown", "out of distribution, 50 rows"]
    assert unseen >= 0.05  # the rows that are certain
    assert dense.get_ylim() == figure.axes[1].get_ylim() and dense.get_ylim()[1] > 1.4 * expected.max()


@pytest.mark.parametrize(
    ("estimator", "outputs"),
    [
        (ps.SparseRegressor("heteroscedastic"), ["mean", "noise scale"]),
        (ps.SparseRegressor("poisson"), ["log rate"]),
        (SparseClassifier(), ["log-odds of 1"]),
        (SparseClassifier(random_state=1), ["0", "1", "2"]),
    ],
)
def test_network_of_an_estimator_names_its_outputs(estimator: Any, outputs: list[str], tmp_path: Path) -> None:
    """Its last round chose among two of four inputs."""
    x = np.random.default_rng(0).normal(size=(60, 4))
    y = np.digitize(x[:, 0], [-0.5, 0.5]) if len(outputs) == 3 else (x[:, 0] > 0).astype(int)
    estimator.set_params(schedule=SCHEDULE, rounds=1, hidden=(3,)).fit(x[:, :2], y)
    masks = {name: torch.ones_like(mask) for name, mask in estimator.structure_.masks.items()}
    values = {name: torch.ones_like(value) for name, value in estimator.structure_.values.items()}
    full = replace(estimator.structure_, masks=masks, values=values)
    estimator.fit_, estimator.n_features_in_ = full, 4
    figure = plots.plot_network(estimator)
    assert figure is not None and saved(figure, tmp_path) > 5_000
    written = [text.get_text() for text in figure.axes[0].texts]
    assert [text for text in written if text in outputs] == outputs and "2 of 4\ninputs" in written


def test_network_draws_live_weights_only(run: Run, tmp_path: Path) -> None:
    # Unit 4 of the first layer is read by none, unit 2 of the second reads none.
    structure = structure_with(
        run, layer1=[(0, 0), (1, 2), (4, 3)], layer2=[(0, 0), (0, 1), (2, 3)], layer3=[(0, 0), (0, 2)]
    )
    figure = plots.plot_network(structure, ["one", "two", "three", "four"])
    assert figure is not None and saved(figure, tmp_path) > 5_000
    edges = [len(c.get_segments()) for c in figure.axes[0].collections if hasattr(c, "get_segments")]
    assert edges == [2, 2, 1]
    written = texts(figure)
    assert "one" in written and "three" in written and "two" not in written and "four" not in written
    assert "2 of 4\ninputs" in written and "2 of 5\nunits" in written and "1 of 3\nunits" in written


def test_network_of_a_fit_has_the_refitted_weights(run: Run) -> None:
    fit = ps.refit(run, ps.select(run), max_iterations=2)
    weights = plots._chain_weights(fit.structure, fit.values)
    assert weights is not None
    fitted = [p.detach().numpy() for p in fit.module().parameters() if p.dim() > 1]
    for weight, expected in zip(weights, fitted, strict=True):
        assert weight == pytest.approx(expected, rel=1e-6)


def test_network_that_is_no_chain_is_left_undrawn() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(x + torch.tanh(self.inner(x)))

    run = run_of(ps.sparsify(Residual()), 3)
    assert plots.plot_network(ps.select(run)) is None
    assert isinstance(plots.plot_inclusion(ps.select(run)), Figure)


def test_pictures_leave_matplotlib_as_it_is(run: Run) -> None:
    before = dict(matplotlib.rcParams)
    plots.plot_annealing(run)
    assert dict(matplotlib.rcParams) == before
