"""How well probabilities of classes are calibrated: NLL, Brier score, ECE, and entropies in and out of distribution."""

from typing import Any

import numpy as np
import torch
import xarray as xr

Array = np.ndarray[Any, Any]

SCHEMES = ("width", "mass")
MAX_SUM_ERROR = 1e-3  # of a row of probabilities: those in single precision are off by less
ENTROPY_EDGES = np.logspace(-8, 0.5, 30)  # nats; of the histograms of Maddox et al.
ADDED_COUNT = 1e-7  # to each bin of them, so that no logarithm is of 0


def nll(probs: Any, labels: Any) -> float:
    r"""Negative log-likelihood of a row in nats, :math:`-\frac1n \sum_i \log p_{i, y_i}`; smaller is better.

    It is infinite where a class that was observed had the probability 0.

    Args:
        probs: (rows, classes) predictive probabilities, which sum to 1 within 1e-3 in each row: a tensor on any device, a
            NumPy or xarray array, a data frame; of two classes both columns.
        labels: (rows,) whole numbers: the column of the class that was observed.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    p, y = _checked(probs, labels)
    with np.errstate(divide="ignore"):
        return float(-np.log(p[np.arange(len(y)), y]).mean())


def brier(probs: Any, labels: Any) -> float:
    r"""Brier score, :math:`\frac1n \sum_i \sum_k (p_{ik} - 1[y_i = k])^2`, in [0, 2]; smaller is better.

    Of two classes it is twice the score that looks at one of them only.

    Args:
        probs: (rows, classes) predictive probabilities, as for :func:`nll`.
        labels: (rows,) whole numbers: the column of the class that was observed.

    Raises:
        ValueError: naming the argument, the rule and the value.

    Source: Brier (1950).
    """
    p, y = _checked(probs, labels)
    p[np.arange(len(y)), y] -= 1
    return float(np.square(p).sum(1).mean())


def ece(probs: Any, labels: Any, num_bins: int = 15, scheme: str = "width") -> float:
    r"""Expected calibration error, :math:`\sum_b \frac{n_b}{n} |\mathrm{accuracy}_b - \mathrm{confidence}_b|`, in [0, 1].

    The confidence of a row is its largest probability and its prediction the class that has it, the first one of several.
    Bins that no row falls in count nothing. Where probabilities are right the ECE is not 0 but about
    :math:`0.8 \sum_b \sqrt{n_b c_b (1 - c_b)} / n` with :math:`c_b` the confidence of a bin, from chance alone.

    Args:
        probs: (rows, classes) predictive probabilities, as for :func:`nll`.
        labels: (rows,) whole numbers: the column of the class that was observed.
        num_bins: 15 by custom with ``"width"``, 20 with ``"mass"``.
        scheme: ``"width"`` for bins (a, b] of equal width over [0, 1], where a confidence of 1 is in the last; ``"mass"`` for
            bins of equally many rows in the order of confidence, up to one more or less. Rows of the same confidence
            share a bin, the lowest that any of them is in, so that the order of rows never matters.

    Raises:
        ValueError: naming the argument, the rule and the value.

    Source: Guo et al. (2017), equation 3; ``"mass"`` as Maddox et al. (2019), who leave out rows on the edges of bins.
    """
    bins = calibration_bins(probs, labels, num_bins, scheme)
    gaps = abs(bins["accuracy"] - bins["confidence"]).fillna(0.0)
    return float((gaps * bins["count"]).sum() / bins["count"].sum())


def js_distance(probs_in: Any, probs_out: Any) -> float:
    r"""How far apart the entropies of predictions are in and out of distribution, as the paper's tables have it, in nats.

    Entropies :math:`-\sum_k p_k \log p_k` are counted between 30 edges from 1e-8 to 10 ** 0.5 nats, evenly spaced in their
    logarithm; 1e-7 is added to each count and the sums are made 1, to a and b. The distance is KL(a‖b) + KL(b‖a): a
    symmetrised Kullback-Leibler divergence, which has no bound and grows with the number of rows where bins are empty, not
    the Jensen-Shannon distance, which is bounded. Larger is better: what is new should be less certain.

    Rows with an entropy outside of the edges are not counted, as in the source: those below 1e-8 are all but certain, and
    those above 3.16 need more than 23 classes.

    Args:
        probs_in: (rows, classes) predictive probabilities of rows like those of training, as for :func:`nll`.
        probs_out: (rows, classes) of others, of any number.

    Raises:
        ValueError: naming the argument, the rule and the value.

    Source: Maddox et al. (2019), section 5.3; CIFAR-10 against SVHN in the paper.
    """
    a = entropy_counts(probs_in, "probs_in") + ADDED_COUNT
    b = entropy_counts(probs_out, "probs_out") + ADDED_COUNT
    a, b = a / a.sum(), b / b.sum()
    return float(((a - b) * np.log(a / b)).sum())


def calibration_bins(probs: Any, labels: Any, num_bins: int = 15, scheme: str = "width") -> xr.Dataset:
    """What :func:`ece` is made of: ``confidence``, ``accuracy`` (NaN in an empty bin) and ``count`` of rows over ``bin``."""
    if isinstance(num_bins, bool) or not isinstance(num_bins, int | np.integer) or num_bins < 1:
        raise ValueError(f"num_bins must be a whole number >= 1, got {num_bins!r}")
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    p, y = _checked(probs, labels)
    confidence, hit = p.max(1), p.argmax(1) == y
    ends = np.arange(1, num_bins)
    # Each fraction is rounded once, so that 0.2 ends the third of 15 bins; of equally many rows the last of each but one.
    inner = ends / num_bins if scheme == "width" else np.sort(confidence)[-(-ends * len(y) // num_bins) - 1]
    bins = np.searchsorted(inner, confidence, side="left")
    count = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(bins, values, num_bins) / count for values in (confidence, hit)]
    return xr.Dataset({"confidence": ("bin", means[0]), "accuracy": ("bin", means[1]), "count": ("bin", count)})


def entropy_counts(probs: Any, name: str = "probs") -> Array:
    """(29,) How many rows have a predictive entropy between each two edges of ENTROPY_EDGES."""
    p = _checked_probs(probs, name)
    entropies = -(p * np.log(np.where(p > 0, p, 1.0))).sum(1)
    counts: Array = np.histogram(entropies, ENTROPY_EDGES)[0]
    if not counts.any():
        least, most = ENTROPY_EDGES[[0, -1]]
        raise ValueError(
            f"{name} must have a row with an entropy from {least:.0e} to {most:.3g} nats, "
            f"got {entropies.min():.3g} to {entropies.max():.3g}"
        )
    return counts


def _checked(probs: Any, labels: Any) -> tuple[Array, Array]:
    """Probabilities in double precision, a copy, and labels as indices."""
    p = _checked_probs(probs, "probs")
    y = _numbers(labels, "labels")
    if y.shape != (len(p),):
        raise ValueError(f"labels must have shape ({len(p)},), one a row of probs, got {y.shape}")
    wrong = ~np.isin(y, np.arange(p.shape[1]))
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"labels must be whole numbers from 0 to {p.shape[1] - 1}, got {y[row]:g} in row {row}")
    return p, y.astype(int)


def _checked_probs(probs: Any, name: str) -> Array:
    p = _numbers(probs, name)
    if p.ndim != 2 or len(p) < 1 or p.shape[1] < 2:
        raise ValueError(f"{name} must have shape (rows, classes) with at least 1 row and 2 classes, got {p.shape}")
    with np.errstate(invalid="ignore"):
        total = p.sum(1)
    for rule, holds, value in (
        ("be finite", np.isfinite(p).all(1), total),
        ("be >= 0", (p >= 0).all(1), p.min(1)),
        (f"sum to 1 within {MAX_SUM_ERROR:g} in each row", abs(total - 1) <= MAX_SUM_ERROR, total),
    ):
        if not holds.all():
            row = int(holds.argmin())
            raise ValueError(f"{name} must {rule}, got {value[row]:g} in row {row}")
    return p


def _numbers(values: Any, name: str) -> Array:
    """A copy in double precision, of tensors on any device and of any precision."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        return np.array(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of numbers, got a {type(values).__name__}") from error
