"""Pictures of a run and of what it found; each function takes values and returns a matplotlib Figure."""

import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import pandas as pd
import torch
import xarray as xr

from pyro_sparse.estimators import SparseClassifier, SparseEstimator, SparseRegressor
from pyro_sparse.inference.calibration import ENTROPY_EDGES, calibration_bins, ece, entropy_counts, js_distance, nll
from pyro_sparse.inference.diagnostics import MAX_R_HAT, MIN_ESS, Diagnosis
from pyro_sparse.inference.refit import Fit
from pyro_sparse.inference.run import Run
from pyro_sparse.inference.schedule import PHASES, PriorAnnealing
from pyro_sparse.inference.structure import Structure, linear_chain
from pyro_sparse.models.spike_slab import SpikeSlab

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]

# Okabe and Ito: told apart by the colour-blind.
BLUE, VERMILLION, GREEN, SKY = "#0072B2", "#D55E00", "#009E73", "#56B4E9"
INK, GREY, PALE = "#333333", "#8C8C8C", "#DCDCDC"
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 150.0,
}
MAX_INPUTS = 30  # bars of plot_inclusion
ENOUGH_INPUTS = 12  # bars after which inputs that nothing leaves are no longer drawn
MAX_ROWS = 150  # intervals of plot_intervals
MAX_NAME = 24  # characters of an input's name
MAX_EFFECTS = 12  # panels of plot_effects
MAX_CLASSES = 5  # lines of one of them
COLORS = (BLUE, VERMILLION, GREEN, SKY, "#CC79A7")
MARKERS = ("o", "s", "^", "D")  # with COLORS, 20 lines that differ

P = ParamSpec("P")
R = TypeVar("R")


def _styled(plot: Callable[P, R]) -> Callable[P, R]:
    """Draws in the style of this module and leaves matplotlib's settings as they are."""

    @functools.wraps(plot)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return plot(*args, **kwargs)

    return styled


@_styled
def plot_schedule(schedule: PriorAnnealing, prior: SpikeSlab) -> "Figure":
    """The controls of a run over its steps and, beside them, the prior of a weight on its way.

    Args:
        schedule: whose controls are shown.
        prior: law of one weight; of several hyper-parameters the first is taken.
    """
    figure, axes = _figure(
        9.5, 5.6, [["power", "density"], ["spike", "density"], ["heat", "inclusion"], ["rate", "inclusion"]]
    )
    law = _scalar_law(prior)
    steps = _sampled_steps(schedule)
    controls = [schedule.at(int(step)) for step in steps]
    spikes = [law.at(c.spike_progress) for c in controls]
    left = [axes[name] for name in ("power", "spike", "heat", "rate")]
    _line(left[0], steps, [c.prior_power for c in controls], "prior power η")
    _line(left[1], steps, [float(s.current_spike_scale) for s in spikes], "weight", log=True)
    thresholds = [float(s.inclusion_threshold) for s in spikes]
    left[1].plot(steps, thresholds, color=VERMILLION, linewidth=1.5)
    spike_line, threshold_line = left[1].lines
    left[1].legend([threshold_line, spike_line], ["threshold", "spike scale σ₀"], loc="lower left", fontsize=8)
    _line(left[2], steps, [c.temperature for c in controls], "temperature τ")
    _line(left[3], steps, [c.learning_rate for c in controls], "learning rate ε")
    for panel in left:
        _mark_phases(panel, schedule, named=panel is left[0])
        panel.set_xticklabels([]) if panel is not left[3] else panel.set_xlabel("step")
    _draw_prior(axes["density"], axes["inclusion"], law)
    return figure


@_styled
def plot_annealing(run: Run) -> "Figure":
    """Loss and kept weights on the whole way, one line a chain, with the phases of the schedule.

    Raises:
        ValueError: of a run without a history, loaded before it was through.
    """
    from matplotlib.ticker import MaxNLocator

    if not run.history.sizes["chain"]:
        raise ValueError("run must have a history to be plotted, got none: the run's folder has no checkpoint yet")
    figure, axes = _figure(7.5, 4.6, [["loss"], ["kept"]])
    steps = run.history["step"].values
    for panel, name in ((axes["loss"], "loss"), (axes["kept"], "num_kept")):
        for number, chain in enumerate(run.history[name].values):
            color = COLORS[number % len(COLORS)]
            if name == "loss":  # of one batch each: the mean over neighbours shows the way
                panel.plot(steps, chain, color=color, linewidth=0.7, alpha=0.3)
                chain = _running_mean(chain)
            panel.plot(steps, chain, color=color, linewidth=1.6)
    axes["loss"].set_ylabel("mean loss of a batch\n(nats a row)")
    axes["loss"].set_ylim(_robust_limits(run.history["loss"].values))
    axes["kept"].set_ylabel("weights above the\nfinal threshold")
    if run.history["num_kept"].max() > 20:
        axes["kept"].set_yscale("symlog", linthresh=10)
    else:
        axes["kept"].yaxis.set_major_locator(MaxNLocator(integer=True))
    axes["kept"].set_ylim(bottom=0)
    axes["kept"].set_xlabel("step")
    axes["loss"].set_xticklabels([])
    for panel in axes.values():
        _mark_phases(panel, run.schedule, named=panel is axes["loss"])
    kept = run.history["num_kept"].values
    end = ", ".join(f"{int(number):,}" for number in kept[:5, -1]) + ("" if len(kept) <= 5 else ", …")
    last = kept[:, -len(steps) // 5 :]
    # Of many weights the fall to the end is on the left above it.
    height, offset, side = (last.min(), -5, "top") if kept.max() > 20 and last.min() > 3 else (last.max(), 5, "bottom")
    axes["kept"].annotate(
        f"{end} at the end, before the refit",
        (steps[-1], height),
        xytext=(0, offset),
        textcoords="offset points",
        ha="right",
        va=side,
        color=INK,
    )
    return figure


@_styled
def plot_diagnosis(diagnosis: Diagnosis) -> "Figure":
    """R-hat and effective draws of every quantity by kind, with their usual limits, and the temperatures of the chains.

    Temperatures have intervals of two standard errors; a quantity that is constant has no point.
    """
    from matplotlib.ticker import NullFormatter

    figure, axes = _figure(9.5, 3.4, [["r_hat", "ess", "temperature"]])
    table, heat = diagnosis.table.to_dataframe(), diagnosis.temperatures
    table = table[table["r_hat"].notna()]
    kinds = table.index.str.split("[").str[0]
    names = list(dict.fromkeys(kinds))
    rank = (table.groupby(kinds).cumcount().to_numpy() + 0.5) / kinds.value_counts()[kinds].to_numpy()
    y = np.array([names.index(kind) for kind in kinds]) + 0.6 * (rank - 0.5)  # along the strip of its kind
    least = table[["ess_bulk", "ess_tail"]].min(axis=1)
    limits = (MAX_R_HAT - 1, MIN_ESS * heat.sizes["chain"])
    columns = ((table["r_hat"] - 1).clip(1e-4, 1.0), least)
    ends = [*least, limits[1]]
    for panel, values, limit in zip((axes["r_hat"], axes["ess"]), columns, limits, strict=True):
        panel.set_xscale("log")
        panel.set_xlim(*((8e-5, 1.2) if panel is axes["r_hat"] else (min(ends) / 1.5, max(ends) * 1.5)))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.axvline(limit, color=GREY, linewidth=1, linestyle="--")
        bad = values > limit if panel is axes["r_hat"] else values < limit
        panel.scatter(values, y, s=12, c=[VERMILLION if one else BLUE for one in bad], linewidths=0)
        panel.set_yticks(range(len(names)), [_short(name.replace("_", " ")) for name in names])
        panel.set_ylim(len(names) - 0.4, -0.6)
    axes["ess"].set_yticklabels([])
    axes["ess"].xaxis.set_major_formatter("{x:g}")
    axes["r_hat"].set_xticks([1e-4, 1e-3, 1e-2, 1e-1, 1], ["1.0001", "1.001", "1.01", "1.1", "2"])
    axes["r_hat"].set_xlabel("R-hat")
    axes["ess"].set_xlabel("effective draws, bulk or tail")
    _draw_temperatures(axes["temperature"], heat)
    figure.suptitle("\n".join(textwrap.wrap(_plain(diagnosis.verdict), 120)), x=0.01, ha="left", fontsize=9)
    return figure


def _draw_temperatures(panel: "Axes", heat: xr.Dataset) -> None:
    """Of each chain, and the one asked for."""
    chains = heat["chain"].values + 1
    for name, off, color in (("kinetic", -0.12, SKY), ("configurational", 0.12, BLUE)):
        error = 2 * heat[f"{name}_se"].values
        panel.errorbar(chains + off, heat[name].values, error, fmt="o", markersize=4, color=color, label=name)
    panel.axhline(float(heat["nominal"][0]), color=GREY, linewidth=1, linestyle="--", label="asked for")
    panel.set_xticks(chains)
    panel.set_xlim(0.5, len(chains) + 0.5)
    panel.set_xlabel("chain")
    panel.set_ylabel("temperature")
    panel.margins(y=0.3)
    panel.legend(fontsize=8, ncols=3, loc="upper center", columnspacing=1, handletextpad=0.3)


@_styled
def plot_inclusion(source: Structure | xr.Dataset | SparseEstimator, names: Sequence[str] | None = None) -> "Figure":
    """Which inputs are selected, the first 30 of them.

    With several runs: in which share of them each input is selected. With one, the kept weights that leave each input.

    Args:
        source: a Structure, what ``mipp`` returns, or a fitted estimator.
        names: one an input, its own where left out; inputs that share a name are shown as one.
    """
    from matplotlib.ticker import MaxNLocator

    runs, weights, num_chains, own = _inclusion(source)
    labels = np.asarray(own if names is None else list(names), dtype=object)
    unique = list(dict.fromkeys(labels))
    shares = np.array([runs[:, labels == name].max(1).mean() for name in unique])
    counts = None if weights is None else np.array([weights[labels == name].sum() for name in unique])
    lengths = shares if counts is None or num_chains > 1 else counts
    selected = shares > 0.5 if counts is None else counts > 0
    most = max(ENOUGH_INPUTS, int(((lengths > 0) | selected).sum()))
    order = np.lexsort((-lengths, ~selected))[: min(most, MAX_INPUTS)]
    figure, axes = _figure(6.0, 1.2 + 0.19 * len(order), [["bars"]])
    panel = axes["bars"]
    _bars(panel, [str(unique[i]) for i in order], lengths[order], selected[order])
    if lengths is shares:
        panel.set_xlim(0, 1)
        if counts is None:  # of a structure the run that fits best decides, not the share
            panel.axvline(0.5, color=GREY, linewidth=0.8, linestyle=":")
        panel.set_xlabel(
            f"share of {num_chains} runs that select the input" if num_chains > 1 else "inclusion probability"
        )
    else:
        networks = len(source.fits_) if isinstance(source, SparseEstimator) else 1
        panel.set_xlabel("kept weights that leave the input" + f" in {networks} networks" * (networks > 1))
        panel.set_xlim(0, max(1, lengths.max()) * 1.05)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    rest = len(unique) - len(order)
    text = f"{int(selected.sum())} of {len(unique)} inputs selected"
    panel.set_title(text + (f" ({rest} other{'s' * (rest != 1)} not drawn)" if rest else ""))
    return figure


@_styled
def plot_intervals(table: pd.DataFrame | xr.Dataset, observed: Any, prob: float = 0.95, unit: str = "") -> "Figure":
    """Intervals of new observations in the order of the prediction, and what was observed.

    Args:
        table: columns ``mean``, ``lower``, ``upper``, from ``predict``; of many rows an even selection is drawn.
        observed: (rows,) the response at these rows.
        prob: content the intervals were made for.
        unit: name of the response, for the axis.
    """
    mean, lower, upper = (np.asarray(table[name]) for name in ("mean", "lower", "upper"))
    y = np.asarray(observed)
    covered = (lower <= y) & (y <= upper)
    order = np.argsort(mean, kind="stable")
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), MAX_ROWS)).round().astype(int))]
    figure, axes = _figure(8.0, 3.8, [["rows"]])
    panel, x = axes["rows"], np.arange(len(shown))
    inside = covered[shown]
    panel.vlines(x, lower[shown], upper[shown], color=PALE, linewidth=max(1.0, min(5.0, 380 / len(shown))))
    panel.plot(x, mean[shown], color=INK, linewidth=1.2, label="predicted mean")
    panel.scatter(x[inside], y[shown][inside], s=11, color=BLUE, zorder=3, label="observed, covered")
    panel.scatter(x[~inside], y[shown][~inside], s=26, color=VERMILLION, marker="D", zorder=4, label="observed, missed")
    panel.set_title(
        f"{prob:.0%} intervals cover {covered.mean():.1%} of {len(y):,} rows, mean width {(upper - lower).mean():.3g}"
    )
    panel.set_xlabel(
        "rows, sorted by prediction" + (f" ({len(shown)} of {len(y):,} drawn)" if len(shown) < len(y) else "")
    )
    panel.set_ylabel(_plain(unit or "response"))
    panel.margins(x=0.01)
    panel.legend(loc="upper left", ncols=3, handletextpad=0.4, columnspacing=1.2)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + 0.12 * (high - low))
    return figure


@_styled
def plot_calibration(probabilities: Any, observed: Any, classes: Any) -> "Figure":
    """Reliability diagram: how often a class is observed where its probability is said to be p, and at how many rows.

    Of two classes the second is shown, of more all at once, each row then counting once a class. Bars are 95 % intervals of
    Clopper and Pearson.

    Args:
        probabilities: (rows, num_classes).
        observed: (rows,) labels.
        classes: (num_classes,) labels, as the columns are.
    """
    p, hit = np.asarray(probabilities, dtype=float), np.asarray(observed)[:, None] == np.asarray(classes)
    pair = len(classes) == 2
    p, hit = (p[:, 1], hit[:, 1]) if pair else (p.ravel(), hit.ravel())
    bins = np.minimum((p * 10).astype(int), 9)
    counts = np.bincount(bins, minlength=10)
    used = np.flatnonzero(counts)
    said, seen = (np.bincount(bins, values, 10)[used] / counts[used] for values in (p, hit.astype(float)))
    figure, axes = _figure(5.0, 5.2, [["share"], ["share"], ["share"], ["count"]])
    panel, below = axes["share"], axes["count"]
    panel.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    low, high = _binomial_interval(np.round(seen * counts[used]), counts[used])
    panel.vlines(said, low, high, color=BLUE, linewidth=1.2)
    panel.scatter(said, seen, s=30, color=BLUE, zorder=3)
    what = f"of {_short(classes[1])}" if pair else "of a class"
    panel.set_ylabel(f"observed share {what}")
    panel.set_title(f"{len(hit):,} unseen rows" if pair else f"{len(hit) // len(classes):,} unseen rows, all classes")
    panel.set_ylim(-0.03, 1.03)
    below.bar(np.arange(10) / 10 + 0.05, counts, width=0.09, color=PALE)
    for place in used:
        below.annotate(
            f"{counts[place]:,}", (place / 10 + 0.05, counts[place]), (0, 2), textcoords="offset points", ha="center"
        )
    below.set_ylim(0, 1.35 * counts.max())
    below.set_yticks([])
    below.set_ylabel("rows" if pair else "rows ×\nclasses")
    _percent_axes(axes, "count", f"predicted probability {what}", (-0.03, 1.03))
    return figure


@_styled
def plot_reliability(predictors: Mapping[str, Any], labels: Any) -> "Figure":
    """Reliability diagram of several predictors: accuracy against confidence in 15 bins of equal width, and what it rests on.

    Above, points under the dotted line are too confident; bins of less than a hundredth of the rows are faint. In
    the middle, how far each is from the line, with 95 % intervals of Clopper and Pearson for the accuracy; below, the rows in
    each bin.

    Args:
        predictors: probabilities (rows, classes) by name, as ``ece`` takes them.
        labels: (rows,) whole numbers, the column of the class that was observed, of all of them.

    Raises:
        ValueError: where there is no predictor, and as ``ece``.
    """
    from matplotlib.ticker import LogLocator

    _check_named(predictors)
    mosaic = [["accuracy"], ["accuracy"], ["accuracy"], ["gap"], ["gap"], ["count"]]
    figure, axes = _figure(5.6, 6.2 + 0.2 * len(predictors), mosaic)
    accuracy, gap, count = (axes[name] for name in ("accuracy", "gap", "count"))
    accuracy.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
    gap.axhline(0, color=GREY, linewidth=0.8, linestyle=":")
    tables, reach = [calibration_bins(probs, labels) for probs in predictors.values()], 0.0
    for number, (name, probs) in enumerate(predictors.items()):
        label = f"{_short(name)}: ECE {ece(probs, labels):.4f}, NLL {nll(probs, labels):.4f}"
        reach = max(reach, _draw_reliability(accuracy, gap, count, tables[number], number, len(tables), label))
    left = min(np.flatnonzero(table["count"])[0] / table.sizes["bin"] for table in tables) - 0.02
    accuracy.set_ylim(min(left, *(float(table["accuracy"].min()) for table in tables)) - 0.03, 1.03)
    accuracy.set_ylabel("accuracy")
    accuracy.set_title(f"{len(labels):,} rows")
    figure.legend(loc="outside upper left")
    gap.set_ylim(-1.1 * reach, 1.1 * reach)
    gap.set_ylabel("accuracy −\nconfidence")
    count.set_ylabel("rows")
    count.set_yscale("log")
    count.set_ylim(bottom=0.7)
    count.yaxis.set_major_locator(LogLocator(numticks=5))
    count.yaxis.set_major_formatter("{x:,g}")
    count.minorticks_off()
    _percent_axes(axes, "count", "confidence: the largest probability of a row", (left, 1.02))
    return figure


@_styled
def plot_entropies(predictors: Mapping[str, tuple[Any, Any]]) -> "Figure":
    """Entropies of predictions in and out of distribution, a panel for each predictor, in the bins of ``js_distance``.

    Rows outside of the bins, most of them all but certain, are said and not shown.

    Args:
        predictors: by name, probabilities (rows, classes) of rows like those of training and of others.

    Raises:
        ValueError: where there is no predictor, and as ``js_distance``.
    """
    from matplotlib.ticker import PercentFormatter

    _check_named(predictors)
    names, most = [str(number) for number in range(len(predictors))], 0.0
    figure, axes = _figure(6.4, 0.7 + 1.75 * len(names), [[name] for name in names], sharey=True)
    for number, (name, pair) in enumerate(predictors.items()):
        panel = axes[str(number)]
        panel.set_title(f"{_short(name)}: JS-distance {js_distance(*pair):.2f} nats")
        for probs, label, color, alpha in zip(pair, ("in", "out of"), (BLUE, VERMILLION), (0.45, 0.25), strict=True):
            share = entropy_counts(probs) / len(probs)
            outside = f", {1 - share.sum():.1%} not shown" if share.sum() < 1 - 1e-9 else ""
            text = f"{label} distribution, {len(probs):,} rows{outside}"
            panel.stairs(share, ENTROPY_EDGES, fill=True, color=color, alpha=alpha, linewidth=0)
            panel.stairs(share, ENTROPY_EDGES, color=color, linewidth=1.4, label=text)
            most = max(most, share.max())
        panel.legend(loc="upper left")
        panel.set_xscale("log")
        panel.set_xlim(ENTROPY_EDGES[0], ENTROPY_EDGES[-1])
        panel.set_ylabel("share of rows")
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.tick_params(labelbottom=panel is axes[names[-1]])
    axes[names[0]].set_ylim(0, 1.5 * most)  # with room for the legends; shared
    axes[names[-1]].set_xlabel("entropy of a prediction (nats)")
    return figure


@_styled
def plot_effects(effects: pd.DataFrame, inputs: pd.DataFrame | None = None, response: str = "") -> "Figure | None":
    """The mean of the response along each selected input, the others as they are in the data: one panel an input.

    Of more than 12 inputs those that move the response most are drawn, of more than 5 classes those that are moved most, of
    two classes the second.

    Args:
        effects: what ``effects`` of an estimator returns.
        inputs: data whose deciles are marked below each line.
        response: its name, for the axis.

    Returns:
        None where no input was selected.
    """
    if effects.empty:
        return None
    effects, label = _drawn_classes(effects, response)
    moves = effects.groupby("input", sort=False).apply(lambda part: part["mean"].max() - part["mean"].min())
    names = list(moves.sort_values(ascending=False, kind="stable").index[:MAX_EFFECTS])
    rows = -(-len(names) // 4)
    columns = -(-len(names) // rows)
    mosaic = np.array([*map(str, range(len(names))), *["."] * (rows * columns - len(names))]).reshape(rows, columns)
    width, labels = max(2.2 * columns + 0.8, 4.2), _class_labels(effects)
    per_line = max(1, int(width / (0.55 + 0.08 * max(map(len, labels), default=1))))
    legend_lines = -(-len(labels) // per_line)
    figure, axes = _figure(width, 2.1 * rows + 0.5 + 0.2 * legend_lines, mosaic.tolist(), sharey=True)
    for number, name in enumerate(names):
        panel = axes[str(number)]
        part = effects[effects["input"] == name]
        values = None if inputs is None or name not in inputs else inputs[name].to_numpy()
        _draw_effect(panel, str(name), part, values)
        panel.set_ylabel(label if number % columns == 0 else "")
        panel.tick_params(labelleft=number % columns == 0)
    if len(labels) > 1:
        lines, texts = axes["0"].get_legend_handles_labels()
        figure.legend(lines, texts, loc="outside upper left", ncols=per_line)
    if len(moves) > len(names):
        figure.supxlabel(f"{len(names)} of {len(moves)} selected inputs, those that move it most", fontsize=9)
    return figure


@_styled
def plot_network(source: "Structure | Fit | SparseEstimator", names: Sequence[str] | None = None) -> "Figure | None":
    """The kept network: selected inputs on the left, live units as dots, a line for each kept weight.

    Args:
        source: a Structure, a Fit for the refitted weights, or a fitted estimator.
        names: one an input of the network, its own where left out.

    Returns:
        None for a network that is no chain of linear layers, or a model with another number of networks than one.
    """
    fit = source.fit_ if isinstance(source, SparseEstimator) else source
    structure = fit.structure if isinstance(fit, Fit) else fit
    weights = _chain_weights(structure, fit.values)
    if weights is None:
        return None
    alive = _alive(weights)
    if not len(alive[0]):
        return _constant_network(_num_inputs(source, structure))
    labels = _own_names(structure) if names is None else [str(name) for name in names]
    places = _places(weights, alive)
    height = max(2.6, 0.24 * max(len(layer) for layer in alive) + 0.9)
    figure, axes = _figure(1.9 * len(alive) + 1.6, min(height, 9.0), [["net"]])
    panel = axes["net"]
    _draw_edges(panel, weights, alive, places)
    for depth, (units, y) in enumerate(zip(alive, places, strict=True)):
        panel.scatter(np.full(len(units), float(depth)), y, s=42, color=INK, zorder=3)
    for unit, y in zip(alive[0], places[0], strict=True):
        panel.annotate(_short(labels[unit]), (0, y), (-8, 0), textcoords="offset points", ha="right", va="center")
    outputs = _output_names(source)
    for unit, y in zip(alive[-1], places[-1], strict=True) if outputs else ():
        panel.annotate(_short(outputs[unit]), (len(weights), y), (8, 0), textcoords="offset points", va="center")
    _label_layers(panel, weights, alive, _num_inputs(source, structure))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.06)  # inches between names and the edge
    return figure


def _figure(
    width: float, height: float, mosaic: list[list[str]], sharey: bool = False
) -> "tuple[Figure, dict[str, Axes]]":
    # No pyplot: nothing global changes, no window opens.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    return figure, figure.subplot_mosaic(mosaic, sharey=sharey)  # type: ignore[arg-type]


def _line(panel: "Axes", steps: Array, values: Sequence[float], label: str, log: bool = False) -> None:
    panel.plot(steps, values, color=BLUE, linewidth=1.5)
    panel.set_ylabel(label)
    panel.margins(x=0)
    if log:
        panel.set_yscale("log")
    else:
        panel.set_ylim(0, 1.15 * max([*values, 1e-12]))


def _sampled_steps(schedule: PriorAnnealing, count: int = 600) -> Array:
    """Steps evenly spaced and at both sides of every jump."""
    even = np.linspace(0, schedule.num_steps - 1, count).round()
    jumps = np.array([*_starts(schedule).values(), *schedule.learning_rate_drops])
    steps = np.unique(np.concatenate([even, jumps, jumps - 1, jumps + 1, jumps + 3, jumps + 10])).astype(int)
    return steps[(steps >= 0) & (steps < schedule.num_steps)]


def _starts(schedule: PriorAnnealing) -> dict[str, int]:
    """First step of every phase that takes place."""
    lengths = [schedule.length(phase) for phase in PHASES]
    return {phase: sum(lengths[:i]) for i, phase in enumerate(PHASES) if lengths[i]}


def _mark_phases(panel: "Axes", schedule: PriorAnnealing, named: bool) -> None:
    for number, (phase, start) in enumerate(_starts(schedule).items()):
        end = start + schedule.length(phase)
        if number % 2:
            panel.axvspan(start, end, color="#F4F4F4", zorder=-1, linewidth=0)
        if named:
            panel.annotate(
                phase,
                ((start + end) / 2, 1.0),
                (0, 3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                va="bottom",
                color=GREY,
            )
    panel.set_xlim(0, schedule.num_steps)


def _scalar_law(prior: SpikeSlab) -> SpikeSlab:
    numbers = (prior.slab_prob, prior.spike_scale, prior.slab_scale, prior.initial_spike_scale)
    return SpikeSlab(*(number.detach().flatten()[0].cpu().double() for number in numbers), validate_args=False)


def _draw_prior(density: "Axes", inclusion: "Axes", law: SpikeSlab) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    reach = 1.6 * float(law.at(0.0).inclusion_threshold) or 4 * float(law.slab_scale)
    weights = torch.linspace(-reach, reach, 801, dtype=torch.float64)
    path = (0.0, 0.5, 0.9, 0.99, 1.0)
    for progress, shade in zip(path, np.linspace(0.1, 1.0, len(path)), strict=True):
        now, color = law.at(progress), colormaps["viridis_r"](shade)
        density.plot(weights, -now.log_prob(weights), color=color, linewidth=1.5, label=f"u = {progress:g}")
        inclusion.plot(weights, now.inclusion_probability(weights), color=color, linewidth=1.5)
        threshold = float(now.inclusion_threshold)
        inclusion.scatter([-threshold, threshold], [0.5, 0.5], s=16, color=[color], zorder=3)
    density.set_ylabel("negative log prior (nats)")
    density.set_xticklabels([])
    density.legend(title="spike progress", loc="upper center", ncols=3, fontsize=8, title_fontsize=8)
    low, high = density.get_ylim()
    density.set_ylim(low, high + 0.35 * (high - low))
    inclusion.set_ylabel("inclusion probability\n(dots: threshold)")
    inclusion.set_xlabel("weight")
    for panel in (density, inclusion):
        panel.margins(x=0)
        panel.xaxis.set_major_locator(MaxNLocator(5))


def _running_mean(values: Array, width: int = 9) -> Array:
    padded = np.pad(values, width // 2, mode="edge")
    smooth: Array = np.convolve(padded, np.full(width, 1 / width), mode="valid")
    return smooth


def _robust_limits(values: Array) -> tuple[float, float]:
    """Limits that show the path, not the first steps' fall alone."""
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(np.quantile(finite, 0.99))
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room


def _inclusion(source: Structure | xr.Dataset | SparseEstimator) -> tuple[Array, Array | None, int, list[str]]:
    """Inclusion of each input (run, input), or its mean (1, input); kept weights that leave it, number of runs, names."""
    if isinstance(source, SparseEstimator):
        weights = np.zeros(source.n_features_in_, dtype=int)
        weights[source.columns_] = sum(_weights_leaving(fit.structure) for fit in source.fits_)
        own = getattr(source, "feature_names_in_", [f"x{i}" for i in range(len(weights))])
        return source.supports_.astype(float), weights, len(source.supports_), [str(name) for name in own]
    if isinstance(source, Structure):
        share = source.input_probability.cpu().numpy()
        return share[None], _weights_leaving(source), source.num_chains, _own_names(source)
    own = [str(name) for name in source["column"].values]
    return source["input"].values[None], None, source.sizes["chain"], own


def _weights_leaving(structure: Structure) -> Array:
    reads = structure.reads.cpu()
    for mask in structure.masks.values():
        if mask.dim() and mask.shape[-1] == len(reads):
            counts = mask.reshape(-1, len(reads)).sum(0).cpu() * reads
            return np.array(counts.tolist(), dtype=int)
    return np.array(reads.tolist(), dtype=int)


def _own_names(structure: Structure) -> list[str]:
    """Names of the inputs: x0, x1, ... where they have none."""
    names = structure.input_names
    return [f"x{i}" for i in range(len(structure.reads))] if names is None else list(names)


def _short(name: Any) -> str:
    text = str(name)
    return _plain(text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 9]}…{text[-8:]}")


def _plain(text: str) -> str:
    """A name as it is, where matplotlib would read formulas between dollar signs."""
    return text.replace("$", r"\$")


def _bars(panel: "Axes", names: list[str], lengths: Array, selected: Array) -> None:
    y = np.arange(len(names))
    panel.barh(y, lengths, height=0.65, color=[BLUE if chosen else GREY for chosen in selected])
    panel.set_yticks(y, [_short(name) for name in names])
    for label, chosen in zip(panel.get_yticklabels(), selected, strict=True):
        label.set_color(INK if chosen else GREY)
    panel.invert_yaxis()
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)


def _drawn_classes(effects: pd.DataFrame, response: str) -> tuple[pd.DataFrame, str]:
    """The classes to draw, those that are moved most, and the name of the axis."""
    if "class" not in effects:
        return effects, f"mean of {_short(response) if response else 'the response'}"
    classes = list(effects["class"].unique())
    if len(classes) == 2:
        return effects[effects["class"] == classes[1]], f"P({_short(classes[1])})"
    by_input = effects.groupby(["class", "input"], sort=False)["mean"]
    moves = (by_input.max() - by_input.min()).groupby("class", sort=False).max()
    most = set(moves.sort_values(ascending=False, kind="stable").index[:MAX_CLASSES])
    return effects[effects["class"].isin(most)], "probability"


def _class_labels(effects: pd.DataFrame) -> list[str]:
    return [_short(label) for label in effects["class"].unique()] if "class" in effects else []


def _draw_effect(panel: "Axes", name: str, effect: pd.DataFrame, data: Array | None) -> None:
    """One line with its band a class, or dots with bars at two values or at levels of text."""
    values = list(dict.fromkeys(effect["value"]))
    apart = len(values) <= 2 or isinstance(values[0], str)
    groups = [(None, effect)] if "class" not in effect else list(effect.groupby("class", sort=False))
    for number, (label, part) in enumerate(groups):
        mean, low, high = (part[column].to_numpy(dtype=float) for column in ("mean", "mean_lower", "mean_upper"))
        color, text = COLORS[number % len(COLORS)], None if label is None else _short(label)
        if apart:
            place = np.arange(len(mean)) + 0.12 * (number - (len(groups) - 1) / 2)
            panel.errorbar(place, mean, (mean - low, high - mean), fmt="o", color=color, markersize=5, label=text)
        else:
            x = part["value"].to_numpy(dtype=float)
            panel.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
            panel.plot(x, mean, color=color, linewidth=1.6, label=text)
    if apart:
        named = [_short(value) if isinstance(value, str) else f"{value:g}" for value in values]
        upright = sum(map(len, named)) > 18
        panel.set_xticks(range(len(values)), named, rotation=90 if upright else 0)
        panel.set_xlim(-0.5, len(values) - 0.5)
    elif data is not None:
        panel.margins(x=0.02)
        limits = panel.get_xlim()
        deciles = np.quantile(data, np.arange(1, 10) / 10)
        at = panel.get_xaxis_transform()
        panel.plot(deciles, np.full(9, 0.02), "|", color=GREY, markersize=6, transform=at, clip_on=True)
        panel.set_xlim(limits)
    panel.set_title(_short(name), fontsize=9)


def _binomial_interval(successes: Array, trials: Array) -> tuple[Array, Array]:
    from scipy import stats

    low = np.where(successes > 0, stats.beta.ppf(0.025, successes, trials - successes + 1), 0.0)
    high = np.where(successes < trials, stats.beta.ppf(0.975, successes + 1, trials - successes), 1.0)
    return low, high


def _draw_reliability(
    accuracy: "Axes", gap: "Axes", count: "Axes", bins: xr.Dataset, number: int, total: int, label: str
) -> float:
    """One predictor of several, side by side in a bin where they would hide each other; how far its gaps reach.

    Bins with less than a hundredth of the rows are faint, and their intervals do not count in that.
    """
    rows = bins["count"].values
    used = np.flatnonzero(rows)
    said, seen = bins["confidence"].values[used], bins["accuracy"].values[used]
    low, high = _binomial_interval(np.round(seen * rows[used]), rows[used])
    color, width = COLORS[number % len(COLORS)], 1 / len(rows)
    marker = MARKERS[number % len(MARKERS)]
    place = width * (np.arange(len(rows)) + 0.5 + 0.8 * ((number + 0.5) / total - 0.5))
    many = rows[used] >= 0.01 * rows.sum()
    accuracy.vlines(said[many], said[many], seen[many], color=color, linewidth=2.5, alpha=0.3)
    accuracy.plot(said[many], seen[many], color=color, marker=marker, markersize=5, linewidth=1.2, label=label)
    accuracy.plot(said[~many], seen[~many], color=color, marker=marker, markersize=5, linestyle="none", alpha=0.3)
    ends = np.stack([low, high]) - said
    gap.vlines(place[used], *ends, color=color, linewidth=1.2)
    gap.plot(place[used], seen - said, color=color, marker=marker, markersize=4, linestyle="none")
    count.bar(place, rows, width=0.8 * width / total, color=color)
    return float(max(abs(seen - said).max(), abs(ends[:, many]).max()))


def _percent_axes(axes: "dict[str, Axes]", lowest: str, label: str, limits: tuple[float, float]) -> None:
    """Probabilities along all panels, written below the lowest, and up the others."""
    from matplotlib.ticker import PercentFormatter

    for name, panel in axes.items():
        panel.set_xlim(limits)
        panel.xaxis.set_major_formatter(PercentFormatter(1.0))
        panel.tick_params(labelbottom=name == lowest)
        if name != lowest:
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[lowest].set_xlabel(label)


def _check_named(predictors: Mapping[str, Any]) -> None:
    if not isinstance(predictors, Mapping) or not predictors:
        raise ValueError(f"predictors must give at least one predictor its name, got {type(predictors).__name__}")


def _num_inputs(source: Structure | Fit | SparseEstimator, structure: Structure) -> int:
    """All inputs, also those that an estimator's last round no longer chose among."""
    return int(source.n_features_in_) if isinstance(source, SparseEstimator) else len(structure.reads)


def _output_names(source: Any) -> list[str]:
    """What the outputs of an estimator's network are, where that is known."""
    if isinstance(source, SparseClassifier):
        labels = [str(label) for label in source.classes_]
        return [f"log-odds of {labels[1]}"] if len(labels) == 2 else labels
    if isinstance(source, SparseRegressor):
        return {"heteroscedastic": ["mean", "noise scale"], "poisson": ["log rate"]}.get(source.family, ["mean"])
    return []


def _chain_weights(structure: Structure, values: dict[str, torch.Tensor]) -> list[Array] | None:
    """The weight matrices of the model's one network, layer by layer."""
    modules = structure.layout.modules()
    chain = linear_chain(modules[0].module) if len(modules) == 1 else None
    if chain is None:
        return None
    sites = structure.layout.of_module(modules[0])
    return [values[sites[layer.weight].name].detach().cpu().double().numpy() for layer in chain]


def _alive(weights: list[Array]) -> list[Array]:
    """Units with a path from an input and to an output, layer by layer; the inputs first."""
    forward = [np.ones(weights[0].shape[1], dtype=bool)]
    for weight in weights:
        forward.append(((weight != 0) & forward[-1]).any(1))
    backward = [forward[-1]]
    for weight in reversed(weights):
        backward.append(((weight != 0) & backward[-1][:, None]).any(0))
    return [np.flatnonzero(f & b) for f, b in zip(forward, reversed(backward), strict=True)]


def _places(weights: list[Array], alive: list[Array]) -> list[Array]:
    """Heights in [0, 1], each unit near those it reads, so that few lines cross."""
    places = [_spread(len(alive[0]), np.arange(len(alive[0])))]
    for weight, reads, units in zip(weights, alive[:-1], alive[1:], strict=True):
        strength = np.abs(weight[np.ix_(units, reads)])
        places.append(_spread(len(units), strength @ places[-1] / strength.sum(1)))
    return places


def _spread(count: int, wish: Array) -> Array:
    ranks = np.argsort(np.argsort(wish, kind="stable"), kind="stable")
    return np.full(count, 0.5) if count == 1 else ranks / (count - 1) if count else np.zeros(0)


def _draw_edges(panel: "Axes", weights: list[Array], alive: list[Array], places: list[Array]) -> None:
    from matplotlib.collections import LineCollection

    for depth, weight in enumerate(weights):
        block = weight[np.ix_(alive[depth + 1], alive[depth])]
        to, source = np.nonzero(block)
        size = np.abs(block[to, source]) / np.abs(block).max(initial=1e-300)
        order = np.argsort(size)
        to, source, size = to[order], source[order], size[order]
        lines = [
            [(depth, places[depth][s]), (depth + 1, places[depth + 1][t])] for t, s in zip(to, source, strict=True)
        ]
        colors = [BLUE if block[t, s] > 0 else VERMILLION for t, s in zip(to, source, strict=True)]
        panel.add_collection(LineCollection(lines, colors=colors, linewidths=0.4 + 2.8 * size, alpha=0.75, zorder=1))


def _label_layers(panel: "Axes", weights: list[Array], alive: list[Array], num_inputs: int) -> None:
    sizes = [num_inputs, *(weight.shape[0] for weight in weights)]
    for depth, (units, size) in enumerate(zip(alive, sizes, strict=True)):
        what = "inputs" if depth == 0 else "units" if depth < len(weights) else "output" if size == 1 else "outputs"
        text = what if size == 1 else f"{len(units)} of {size}\n{what}"
        panel.annotate(
            text, (depth, 0), (0, -8), ("data", "axes fraction"), "offset points", ha="center", va="top", color=GREY
        )
    panel.set_axis_off()
    panel.set_xlim(-0.25, len(weights) + 0.15)
    panel.set_ylim(1.06, -0.06)
    panel.plot([], [], color=BLUE, label="positive weight")
    panel.plot([], [], color=VERMILLION, label="negative weight")
    panel.plot([], [], linestyle="none", label="width: size within the layer")
    panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)


def _constant_network(num_inputs: int) -> "Figure":
    figure, axes = _figure(6.0, 1.6, [["net"]])
    axes["net"].set_axis_off()
    text = f"No weight leaves any of the {num_inputs} inputs:\nthe network is a constant."
    axes["net"].text(0.5, 0.5, text, ha="center", va="center", fontsize=11)
    return figure
