"""Metrics in words: what was selected, which way it acts, how sure that is, and where the fit falls short."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from pyro_sparse.measures import HEADINGS, NETWORK, PROB, baseline

WIDTH = 88  # characters of a line of the summary
INDENT = 10
MODEL = 36  # characters of a model's name in the table
MAX_EFFECTS = 12  # lines of the summary
MAX_ALIKE = 8  # inputs of the summary


def directions(effects: pd.DataFrame) -> list[dict[str, Any]]:
    """Which way each selected input moves the mean, and how far.

    ``direction`` is "rises" or "falls" where all but a twentieth of the way leads there, "not monotone" elsewhere, "differs"
    between levels of text, and "no clear effect on its own" where the interval of every difference from the first point
    holds 0. ``ends`` are the points ``[value, mean, lower, upper]`` at both ends of the way, or the lowest and the highest.
    Of two classes the second is described, of more the one that the input moves most.
    """
    if "class" in effects and len(effects):
        classes = list(effects["class"].unique())
        if len(classes) == 2:
            effects = effects[effects["class"] == classes[1]]
    return [_direction(str(name), part) for name, part in effects.groupby("input", sort=False)]


def _direction(name: str, effect: pd.DataFrame) -> dict[str, Any]:
    found: dict[str, Any] = {"input": name}
    if "class" in effect:
        groups = effect.groupby("class", sort=False)["mean"]
        most = (groups.max() - groups.min()).idxmax()
        effect, found["class"] = effect[effect["class"] == most], str(most)
    points = effect[["value", "mean", "mean_lower", "mean_upper"]].to_numpy().tolist()
    mean = effect["mean"].to_numpy(dtype=float)
    steps = np.diff(mean)
    up, down = steps[steps > 0].sum(), -steps[steps < 0].sum()
    extremes, ends = [points[mean.argmin()], points[mean.argmax()]], [points[0], points[-1]]
    clear = ((effect["difference_lower"] > 0) | (effect["difference_upper"] < 0)).any()
    if not clear:
        direction, ends = "no clear effect on its own", extremes
    elif isinstance(points[0][0], str):
        direction, ends = "differs", extremes
    elif min(up, down) > 0.05 * np.ptp(mean):
        direction, ends = "not monotone", extremes
    else:
        direction = "rises" if up > down else "falls"
    return found | {"direction": direction, "ends": ends}


def summary(name: str, metrics: dict[str, Any], notes: Sequence[str] = ()) -> str:
    """A study in words and one small table.

    Args:
        name: of the data.
        metrics, notes: as in :class:`pyro_sparse.report.Study`.
    """
    rows = metrics["rows"]
    lines = [
        f"{name}: '{metrics['target']}' from {len(metrics['inputs'])} inputs, {rows['fitted']:,} rows fitted"
        + (f", {rows['held_out']:,} unseen" if rows["held_out"] else ", none left to measure on"),
        "",
        *(_wrapped(f"{heading:<{INDENT}}", text) for heading, text in _facts(metrics)),
    ]
    if metrics["held_out"]:
        lines += ["", *_comparison(metrics)]
    shortfalls = [text[:1].upper() + text[1:] for text in (*_shortfalls(metrics), *notes)]
    if shortfalls:
        lines += ["", "Where it falls short", *(_wrapped("  - ", text) for text in shortfalls)]
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _facts(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    selected = metrics["selected"]
    facts = [
        ("response", _response(metrics)),
        ("selected", f"{len(selected)} of {len(metrics['inputs'])} inputs: {', '.join(selected) or 'none'}"),
        *_effects(metrics),
        ("network" if metrics["hidden"] else "model", _network(metrics)),
    ]
    if metrics["left_out"]:
        facts.append(("left out", ", ".join(f"'{name}' ({why})" for name, why in metrics["left_out"].items())))
    if metrics["rows"]["dropped"]:
        column, count = metrics["rows"]["most_blanks"]
        text = f"{metrics['rows']['dropped']:,} of {metrics['rows']['read']:,} rows, for blanks, most in '{column}' ({count:,})"
        facts.append(("dropped", text))
    return facts + _certainty(metrics["runs"], metrics["selected_in_runs"], selected) + _alike(metrics["alike"])


def _network(metrics: dict[str, Any]) -> str:
    weights = metrics["weights"]
    kept, of = [f"{number:,}" for number in weights["kept"]], f"{weights['of']:,}"
    if not metrics["hidden"]:
        return f"linear, {kept[0]} of {of} weights kept: of better extended BIC than networks; it sees no effect that bends"
    if len(kept) == 1:
        return f"{kept[0]} of {of} weights kept"
    return f"the average of {len(kept)}, with {', '.join(kept[:-1])} and {kept[-1]} of {of} weights kept"


def _response(metrics: dict[str, Any]) -> str:
    if metrics["family"] == "classes":
        classes = [f"{label} ({count:,})" for label, count in metrics["classes"].items()]
        more = f" and {len(classes) - 8} more" if len(classes) > 8 else ""
        return f"one of {len(classes)} classes: {', '.join(classes[:8])}{more}"
    if metrics["family"] == "poisson":
        return "counts, Poisson"
    if metrics["family"] == "heteroscedastic":
        return "normal, its noise by row"
    return f"normal, noise of standard deviation {metrics['noise_scale']:.4g}"


def _effects(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """What is moved, and a line an input."""
    effects, several = metrics["effects"], len(metrics["classes"] or ()) > 2
    if not effects:
        return []
    moved = f"the mean of '{metrics['target']}'" if metrics["classes"] is None else f"P({effects[0].get('class')})"
    moved = "the probability of the class that each moves most" if several else moved
    lines = [f"on {moved}, averaged over the rows fitted, with {PROB:.0%} intervals"]
    for effect in effects[:MAX_EFFECTS]:
        start, end = (
            f"{mean:.3g} ({lower:.3g} to {upper:.3g}) at {_value(value)}"
            for value, mean, lower, upper in effect["ends"]
        )
        one_way = effect["direction"] in ("rises", "falls")
        way = f" from {start} to {end}" if one_way else f": between {start} and {end}"
        of = f"P({effect['class']}) " if several else ""
        lines.append(f"{effect['input']}: {of}{effect['direction']}{way}")
    more = len(effects) - MAX_EFFECTS
    lines += [f"and {more} more in effects.csv"] if more > 0 else []
    return [("effects" if not number else "", line) for number, line in enumerate(lines)]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _certainty(runs: int, shares: dict[str, float], selected: list[str]) -> list[tuple[str, str]]:
    if runs == 1:
        return [("how sure", "one run says which inputs, not how surely; the intervals take them as given")]
    counts: dict[int, list[str]] = {}
    for name, share in shares.items():
        counts.setdefault(round(share * runs), []).append(name)
    counts[0] = [name for name in counts.get(0, []) if name in selected]
    said = [f"{', '.join(names)} in {count} of {runs} runs" for count, names in sorted(counts.items())[::-1] if names]
    said = said or [f"nothing in any of {runs} runs"]
    split = any(shares.get(name, 0.0) <= 0.5 for name in selected)
    kept = "what fits best of the vote, each run and forward selection" if split else "what more than half choose"
    hangs = "how much hangs on where a run starts, not on which rows there are"
    facts = [("how sure", f"{'; '.join(said)}: {hangs}; kept is {kept}")]
    dropped = [name for name, share in shares.items() if share > 0.5 and name not in selected]
    if dropped:
        facts.append(("", f"not selected, since the final model does not read them: {', '.join(dropped)}"))
    return facts


def _alike(pairs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    said = [f"{one['input']} with {one['selected']} ({one['correlation']:.2f})" for one in pairs[:MAX_ALIKE]]
    more = f" and {len(pairs) - MAX_ALIKE} more" if len(pairs) > MAX_ALIKE else ""
    if not pairs:
        return []
    return [
        ("alike", f"left out, but correlated with what is selected: {', '.join(said)}{more}; either may be what acts")
    ]


def _comparison(metrics: dict[str, Any]) -> list[str]:
    held_out, n = metrics["held_out"], metrics["rows"]["held_out"]
    columns = [name for name in HEADINGS if name in held_out["models"][NETWORK]]
    title = f"On {n:,} unseen rows"
    return [
        f"{title:<{MODEL}}" + "".join(f"{HEADINGS[name]:>9}" for name in columns),
        *(
            f"  {model:<{MODEL - 2}}" + "".join(f"{_digits(name, scores[name]):>9}" for name in columns)
            for model, scores in held_out["models"].items()
        ),
        "",
        *_calibration(metrics["family"], held_out, n, len(metrics["classes"] or ())),
    ]


def _digits(measure: str, value: float | None) -> str:
    if value is None:
        return "-"
    if measure == "accuracy":
        return f"{value:.1%}"
    return f"{value:.4g}" if measure in ("rmse", "deviance") else f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no minus zero


def _calibration(family: str, held_out: dict[str, Any], n: int, num_classes: int) -> list[str]:
    low, high = held_out["covered_if_calibrated"]
    covered, share = f"{held_out['covered']:,} of {n:,}", f"{held_out['coverage']:.1%}"
    expected = f"at least {low:,}" if family == "poisson" else f"{low:,} to {high:,}"
    if family == "classes":
        return [
            f"{PROB:.0%} prediction sets contain the class of {covered} rows ({share}; calibrated ones: {expected})",
            f"mean size {held_out['mean_set_size']:.3g} of {num_classes} classes, where no input is known "
            f"{held_out['set_size_without_inputs']}",
        ]
    return [
        f"{PROB:.0%} intervals cover {covered} ({share}; calibrated ones cover {expected})",
        f"mean width {held_out['mean_width']:.4g}, where no input is known {held_out['mean_width_without_inputs']:.4g}",
        f"interval score {held_out['interval_score']:.4g}: width and the cost of misses, the lower the better",
    ]


def _shortfalls(metrics: dict[str, Any]) -> list[str]:
    held_out = metrics["held_out"]
    texts = []
    rows = metrics["rows"]
    if rows["dropped"] > rows["read"] / 5:
        column = rows["most_blanks"][0]
        remedy = f": --ignore '{column}' would keep some" * (column != metrics["target"])
        texts.append(f"Blanks cost {rows['dropped'] / rows['read']:.0%} of the rows{remedy}.")
    if not metrics["selected"]:
        texts.append("No input was selected: the prediction is the same for every row.")
    if not metrics["converged"]:
        texts.append("The refit has not converged: weights and intervals are not at their maximum.")
    if held_out:
        texts += _unseen_shortfalls(metrics["family"], held_out)
    return texts


def _unseen_shortfalls(family: str, held_out: dict[str, Any]) -> list[str]:
    measure = {"classes": " in log loss", "poisson": " in deviance"}.get(family, "")
    texts = []
    for name, scores in held_out["models"].items():
        better = scores.get("better_by", 0.0)
        subject = f"{name[0].upper()}{name[1:]} predict{'' if name.endswith('trees') else 's'} better{measure}"
        if name == baseline(family) and better < 2:
            how = "Not clearly better" if better >= 0 else "Worse"
            texts.append(f"{how} than the {name}{measure}: by {abs(better):.1f} standard errors.")
        elif name == "boosted trees" and better < -2:
            texts.append(f"{subject}, clearly: by {-better:.1f} standard errors.")
        elif name not in (NETWORK, baseline(family), "boosted trees") and better <= -0.5:
            how = "clearly" if better < -2 else "though no more than chance may do"
            texts.append(f"{subject}, {how}: by {-better:.1f} standard errors.")
    low, high = held_out["covered_if_calibrated"]
    if not low <= held_out["covered"] <= high:
        small, large = ("small", "large") if family == "classes" else ("narrow", "wide")
        what = "prediction sets" if family == "classes" else "intervals"
        texts.append(f"The {what} are too {small if held_out['covered'] < low else large} on these rows.")
    return texts
