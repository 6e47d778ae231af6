"""Pyro models to start from: a sparse network in front of a response of five families."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn import functional

Net = Callable[[Tensor], Tensor]


def regression_model(
    net: Net,
    num_data: int,
    family: str = "normal",
    min_scale: float = 0.1,
    offset: float | Sequence[float] = 0.0,
) -> Callable[..., Any]:
    r"""A Pyro model of a response around a sparse network f, one of five families.

    | family | response | law | outputs of f |
    |---|---|---|---|
    | normal | real | :math:`N(o + f, (s + \sigma)^2)`, :math:`\sigma \sim` HalfNormal(1) | 1 |
    | heteroscedastic | real | :math:`N(o + f_1, (s + \log(1 + e^{f_2 + c}))^2)` | 2 |
    | bernoulli | 0.0, 1.0 | log-odds :math:`o + f` | 1 |
    | categorical | 0, 1, ..., K - 1, whole numbers | softmax :math:`(o + f)` | K |
    | poisson | 0.0, 1.0, ... | rate :math:`\exp(o + f)` | 1 |

    The floor :math:`s` keeps a noise scale from collapsing where the network can follow every response (more inputs than
    rows): without it the likelihood grows without bound. Where the scale differs between rows, it grows no faster than
    :math:`f_2` and falls no lower than the floor, so that one row far out cannot throw the first steps of training; the
    constant :math:`c` makes it 1 where :math:`f_2 = 0`. With the offset :math:`o` the network works about 0, where its
    prior expects it: :math:`\log` of the mean count, say, or of the shares of the classes.

    Args:
        net: maps (rows, inputs) to (rows, outputs), a :class:`SparseNet` or any module made sparse.
        num_data: rows of the training data, >= 1.
        family: one of the five.
        min_scale: the floor s, in (0, 1), in units of the response; the default suits a response of unit variance.
        offset: the constant o, finite; of the categorical family one for each class, or 0.

    Returns:
        A Pyro model of (x, y=None) with the response's site ``y``, and ``sigma_above_floor`` of the normal family, fit for
        batches.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    if not num_data >= 1:
        raise ValueError(f"num_data must be >= 1, got {num_data}")
    if family not in _LAWS:
        raise ValueError(f"family must be one of {', '.join(_LAWS)}, got {family!r}")
    if not min_scale > 0:
        raise ValueError(f"min_scale must be > 0, got {min_scale}")
    if family == "heteroscedastic" and not min_scale < 1:
        raise ValueError(f"min_scale must lie in (0, 1), got {min_scale}")
    offset = offset.tolist() if hasattr(offset, "tolist") else offset  # of an array
    offsets = tuple(offset) if isinstance(offset, Sequence) else (offset,)
    if not all(math.isfinite(number) for number in offsets):
        raise ValueError(f"offset must be finite, got {offset}")
    if isinstance(offset, Sequence) != (family == "categorical") and offset != 0:
        rule = "list a number for each class" if family == "categorical" else "be one number"
        raise ValueError(f"offset must {rule} for the {family} family, got {offset}")
    return _Regression(net, num_data, family, min_scale, offsets if family == "categorical" else offsets[0])


def normal_regression(net: Net, num_data: int, min_scale: float = 0.1) -> Callable[..., Any]:
    r"""The model :math:`y \sim N(f(x), (s + \sigma)^2)`, :math:`\sigma \sim` HalfNormal(1), with a learned noise scale.

    It is ``regression_model(net, num_data, "normal", min_scale)``, where its arguments are explained.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    return regression_model(net, num_data, "normal", min_scale)


@dataclass(frozen=True, eq=False)
class _Regression:  # a class, for a function inside another cannot be pickled
    net: Net
    num_data: int
    family: str
    min_scale: float
    offset: float | tuple[float, ...]

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Any:
        scale: float | Tensor = self.min_scale
        if self.family == "normal":
            scale = scale + pyro.sample("sigma_above_floor", dist.HalfNormal(1.0))
        outputs = self.net(x)
        num_outputs, law_of = _LAWS[self.family]
        if num_outputs not in (None, outputs.shape[-1]):
            raise ValueError(
                f"net must have {num_outputs} output{'s' * (num_outputs != 1)} for the {self.family} family, got shape "
                f"{tuple(outputs.shape)}"
            )
        if isinstance(self.offset, tuple) and len(self.offset) not in (1, outputs.shape[-1]):
            raise ValueError(
                f"offset must list {outputs.shape[-1]} numbers, one for each output of net, got {len(self.offset)}"
            )
        offset = outputs.new_tensor(self.offset) if isinstance(self.offset, tuple) else self.offset
        law = law_of(outputs, offset, scale)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", law, obs=y)


def _normal(outputs: Tensor, offset: float, scale: Any) -> Any:
    return dist.Normal(offset + outputs.squeeze(-1), scale)


def _heteroscedastic(outputs: Tensor, offset: float, floor: Any) -> Any:
    start = math.log(math.expm1(1 - floor))  # log(1 + exp(start)) = 1 - floor
    return dist.Normal(offset + outputs[..., 0], floor + functional.softplus(outputs[..., 1] + start))


def _bernoulli(outputs: Tensor, offset: float, scale: Any) -> Any:
    return dist.Bernoulli(logits=offset + outputs.squeeze(-1))


def _categorical(outputs: Tensor, offset: Tensor, scale: Any) -> Any:
    return dist.Categorical(logits=offset + outputs)


def _poisson(outputs: Tensor, offset: float, scale: Any) -> Any:
    return dist.Poisson(torch.exp(offset + outputs.squeeze(-1)))


_LAWS: dict[str, tuple[int | None, Callable[[Tensor, Any, Any], Any]]] = {
    "normal": (1, _normal),
    "heteroscedastic": (2, _heteroscedastic),
    "bernoulli": (1, _bernoulli),
    "categorical": (None, _categorical),
    "poisson": (1, _poisson),
}
