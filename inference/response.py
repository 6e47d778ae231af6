"""The observed site of a model as a function of its parameters and of new rows."""

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import Independent, Normal
from torch import Tensor

from pyro_sparse.inference.inspection import Node, Specification
from pyro_sparse.inference.potential import trace_with
from pyro_sparse.models.layers import evaluating

BLOCK = 8192  # rows evaluated at once
NUMBERS_AT_ONCE = 2**23  # derivatives held at once


class Response:
    """The observed site of a model as a function of the values of its sites and of any number of rows."""

    def __init__(self, spec: Specification, site: str | None = None) -> None:
        if site is None and len(spec.observed) > 1:
            raise ValueError(f"site must name one of the model's responses {list(spec.observed)}, got None")
        self.spec, self.site = spec, site or spec.observed[0]
        if self.site not in spec.observed:
            raise ValueError(f"site must be one of the model's responses {list(spec.observed)}, got '{self.site}'")

    def inputs(self, x_new: Any, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """The model's arguments without its response, checked against those it was run with."""
        given = x_new if isinstance(x_new, (tuple, list)) else (x_new,)
        data = self.spec.data
        if not data:
            raise ValueError("the model reads its data from outside its arguments, so it cannot predict new rows")
        if not 1 <= len(given) <= len(data):
            raise ValueError(f"x_new must hold 1 to {len(data)} arguments of the model, got {len(given)}")
        tensors = [torch.as_tensor(item).to(like.device) for item, like in zip(given, data, strict=False)]
        for position, (tensor, like) in enumerate(zip(tensors, data, strict=False)):
            if tensor.dim() != like.dim() or tensor.shape[1:] != like.shape[1:] or not len(tensor):
                expected = "(rows, " + ", ".join(str(size) for size in like.shape[1:]) + ")"
                raise ValueError(f"x_new must have shape {expected} as data[{position}], got {tuple(tensor.shape)}")
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError("x_new must be finite, got NaN or infinity")
        return tuple(
            t.to(dtype or like.dtype) if like.is_floating_point() else t for t, like in zip(tensors, data, strict=False)
        )

    def blocks(self, num_rows: int, size: int) -> list[Tensor]:
        """Row numbers block by block; a model that subsamples itself gets its own size, the last block padded."""
        device = self.spec.data[0].device if self.spec.data else torch.device("cpu")
        if not self.spec.subsamples_itself:
            return list(torch.arange(num_rows, device=device).split(size))
        own = self.spec.batch_size or num_rows
        return list(torch.arange(-(-num_rows // own) * own, device=device).clamp(max=num_rows - 1).split(own))

    def node(self, values: dict[str, Tensor], arguments: tuple[Tensor, ...], indices: Tensor) -> Node:
        """The response's site on some rows of the model's arguments, its response left out or not."""
        whole = self.spec.subsamples_itself
        given = arguments if whole else tuple(item.index_select(0, indices) for item in arguments)
        absent = len(self.spec.data) - len(given)
        try:
            with evaluating(self.spec.layout.modules()):
                nodes = trace_with(self.spec.model, values, indices, self.spec.plates, (*given, *[None] * absent))
        except (TypeError, AttributeError) as error:
            if not absent:
                raise
            raise ValueError(
                "the model must run without its response, called with None for it "
                f"(`obs=y`, or `obs=None if y is None else y[i]`): {error}"
            ) from error
        if absent and nodes[self.site]["is_observed"]:
            raise ValueError(
                f"site '{self.site}' must be unobserved when its response is None; the model observes it still"
            )
        node = nodes[self.site]
        outer = len(getattr(node["fn"], "batch_shape", ()))
        for frame in node["cond_indep_stack"]:
            if frame.name in self.spec.plates and frame.dim is not None and -frame.dim != outer:
                raise ValueError(
                    f"plate '{frame.name}' over the rows must be the leftmost of site '{self.site}' to predict"
                )
        return node

    def mean(self, values: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """Mean of the response at every row of the inputs."""
        num_rows = len(inputs[0])
        with torch.no_grad():
            means = [self._mean(values, inputs, indices) for indices in self.blocks(num_rows, BLOCK)]
        return torch.cat(means)[:num_rows]

    def _mean(self, values: dict[str, Tensor], inputs: tuple[Tensor, ...], indices: Tensor) -> Tensor:
        node = self.node(values, inputs, indices)
        mean: Tensor = node["fn"].mean
        return mean.expand(torch.broadcast_shapes(mean.shape, (len(indices), *mean.shape[1:])))

    def jacobian(
        self, values_of: Callable[[Tensor], dict[str, Tensor]], free: Tensor, inputs: tuple[Tensor, ...]
    ) -> Tensor:
        """Derivatives (rows, len(free)) of the mean at ``values_of(free)``."""
        if self.spec.subsamples_itself:  # its batch size is fixed, so it cannot be asked for one row
            blocks = self.blocks(len(inputs[0]), BLOCK)
            parts = [torch.func.jacrev(lambda z, b=b: self._mean(values_of(z), inputs, b))(free) for b in blocks]
            return torch.cat(parts)[: len(inputs[0])].detach()

        def mean_of_row(z: Tensor, row: Tensor) -> Tensor:
            return self._mean(values_of(z), inputs, row[None]).sum()

        chunk = max(1, NUMBERS_AT_ONCE // max(1, self.spec.layout.num_coordinates))
        by_row = torch.func.vmap(torch.func.grad_and_value(mean_of_row), in_dims=(None, 0), chunk_size=chunk)
        jacobian, alone = by_row(free, torch.arange(len(inputs[0]), device=inputs[0].device))
        together = self.mean(values_of(free), inputs)
        if not torch.allclose(alone, together, rtol=1e-4, atol=1e-4 * float(together.abs().max())):
            raise ValueError(
                f"the mean of a row of site '{self.site}' must not depend on the other rows, for an interval"
            )
        result: Tensor = jacobian.detach()
        return result

    def check_normal(self, node: Node) -> None:
        """Raises unless the response is one normal number a row, of the same scale in every row."""
        if node["mask"] is not None and node["mask"] is not True:
            raise ValueError(
                f"intervals need every row, got a masked response at site '{self.site}': leave those rows out"
            )
        fn = node["fn"].base_dist if isinstance(node["fn"], Independent) else node["fn"]
        if not isinstance(fn, Normal):
            raise ValueError(f"intervals need a Normal response, got {type(fn).__name__} at site '{self.site}'")
        if fn.loc.dim() != 1:
            raise ValueError(f"intervals need one number a row, got shape {tuple(fn.loc.shape)} at site '{self.site}'")
        if fn.scale.numel() > 1 and not bool(torch.allclose(fn.scale, fn.scale.flatten()[0])):
            raise ValueError(f"intervals need one noise scale for all rows, got several at site '{self.site}'")

    def is_normal(self, values: dict[str, Tensor]) -> bool:
        """Whether the response is one normal number a row."""
        try:
            self.check_normal(self.node(values, self.spec.data, self.blocks(len(self.spec.data[0]), BLOCK)[0]))
        except ValueError:
            return False
        return True

    def residuals(self, values: dict[str, Tensor], data: tuple[Tensor, ...]) -> Tensor:
        """Observed less fitted, of every row of the data the model was run with."""
        parts = []
        for indices in self.blocks(len(data[0]), BLOCK):
            with torch.no_grad():
                node = self.node(values, data, indices)
                self.check_normal(node)
                parts.append(node["value"] - node["fn"].mean)
        return torch.cat(parts)[: len(data[0])]
