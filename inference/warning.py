"""Warnings that point at the user's line, however deep in the libraries they arise."""

import sys
import warnings

_LIBRARIES = ("pyro_sparse", "pyro", "torch", "sklearn", "functools", "contextlib")


def warn(message: str) -> None:
    """A UserWarning at the first line outside of this package and of those that call it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
