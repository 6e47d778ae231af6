"""Simulated data whose truth is known."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

PAPER_INPUTS = (1, 2, 3, 4, 5)  # the inputs that the response of paper_regression depends on, counted from 1


def paper_regression(seed: int, num_rows: int = 10_000, num_inputs: int = 100) -> tuple[Array, Array, Array]:
    r"""The regression of the paper's section 4.1: five inputs act, and all are correlated.

    .. math:: y = \frac{5 x_2}{1 + x_1^2} + 5 \sin(x_3 x_4) + 2 x_5 + N(0, 1), \quad x_j = (e + z_j) / \sqrt 2

    with e and all z_j standard normal, so any two inputs correlate by one half.

    Args:
        seed: of ``numpy.random.RandomState``, in [0, 2^32); its normals are used row by row as (e, z_1, ..., noise).
        num_rows: >= 1.
        num_inputs: >= 5.

    Returns:
        x (rows, inputs), y (rows,), and f (rows,), the mean of y; the noise has variance 1.

    Raises:
        ValueError: where there are too few rows or inputs.
    """
    if not num_rows >= 1:
        raise ValueError(f"num_rows must be >= 1, got {num_rows}")
    if not num_inputs >= len(PAPER_INPUTS):
        raise ValueError(f"num_inputs must be >= {len(PAPER_INPUTS)}, got {num_inputs}")
    normals = np.random.RandomState(seed).standard_normal((num_rows, num_inputs + 2))
    x = (normals[:, :1] + normals[:, 1:-1]) / np.sqrt(2)
    f = 5 * x[:, 1] / (1 + x[:, 0] ** 2) + 5 * np.sin(x[:, 2] * x[:, 3]) + 2 * x[:, 4]
    return x, f + normals[:, -1], f
