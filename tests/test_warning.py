"""Warnings point at the user's line, through this package and the libraries between."""

import functools
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import pyro_sparse as ps
from pyro_sparse.inference.warning import warn


def test_a_warning_of_a_fit_points_at_the_line_that_asked_for_it() -> None:
    rng = np.random.RandomState(0)
    x = rng.standard_normal((300, 2))
    y = x[:, 0] + np.exp(x[:, 0]) * rng.standard_normal(300)
    with pytest.warns(UserWarning, match="noise is clearly larger") as caught:
        ps.SparseRegressor(hidden=(), steps=200, num_runs=1, random_state=0).fit(x, y)
    assert {w.filename for w in caught} == {__file__}


def test_it_stops_at_the_first_line_that_is_not_a_librarys() -> None:
    def in_library(call: Callable[[], None], name: str) -> None:
        exec(compile("call()", "elsewhere.py", "exec"), {"__name__": name, "call": call})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("here")
        in_library(functools.partial(warn, "through"), "pyro_sparse.somewhere")
        in_library(functools.partial(warn, "stops"), "pyro_sparser")
    assert [(str(w.message), w.filename) for w in caught] == [
        ("here", __file__),
        ("through", __file__),
        ("stops", "elsewhere.py"),
    ]
