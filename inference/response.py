"""The observed site of a model as a function of its parameters and of new rows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_sparse.inference.checks import Node
from pyro_sparse.inference.family import Family, family_of, unwrapped
from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.potential import trace_with
from pyro_sparse.models.layers import evaluating

Of = Callable[[Any], Tensor]  # what is asked of the law of the observed site

BLOCK = 8192  # rows evaluated at once
# Of the arguments; images are many, and what a network makes of them is more. A card is fed more at once.
NUMBERS_OF_BLOCK = {"cpu": 2**20, "cuda": 2**25}
NUMBERS_AT_ONCE = 2**23  # derivatives held at once


class Response:
    """The observed site of a model as a function of the values of its sites and of any number of rows."""

    def __init__(self, spec: Specification, site: str | None = None) -> None:
        if site is None and len(spec.responses) > 1:
            raise ValueError(f"site must name one of the model's responses {list(spec.responses)}, got None")
        self.spec, self.site = spec, site or spec.responses[0]
        if self.site not in spec.responses:
            raise ValueError(f"site must be one of the model's responses {list(spec.responses)}, got '{self.site}'")

    def inputs(self, x_new: Any, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """The model's arguments without its response, checked against those it was run with."""
        given = x_new if isinstance(x_new, (tuple, list)) else (x_new,)
        data = self.spec.data
        if not data:
            raise ValueError("the model reads its data from outside its arguments, so it cannot predict new rows")
        if not 1 <= len(given) <= len(data):
            raise ValueError(f"x_new must hold 1 to {len(data)} arguments of the model, got {len(given)}")
        for item in given:
            if not isinstance(item, (Tensor, np.ndarray, Sequence)):
                raise TypeError(f"x_new must hold tensors or arrays, got {type(item).__name__}")
        tensors = [torch.as_tensor(item).to(like.device) for item, like in zip(given, data, strict=False)]
        for position, (tensor, like) in enumerate(zip(tensors, data, strict=False)):
            if tensor.dim() != like.dim() or tensor.shape[1:] != like.shape[1:] or not len(tensor):
                expected = "(rows, " + ", ".join(str(size) for size in like.shape[1:]) + ")"
                raise ValueError(f"x_new must have shape {expected} as data[{position}], got {tuple(tensor.shape)}")
            if like.dtype == torch.uint8 and tensor.is_floating_point():  # 0..255 or 0..1?
                raise ValueError(
                    f"x_new must be uint8 as data[{position}], got {str(tensor.dtype).removeprefix('torch.')}"
                )
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

    def _size(self, arguments: tuple[Tensor, ...]) -> int:
        """Rows of a block."""
        numbers = max([1, *(item[0].numel() for item in arguments)])
        device = arguments[0].device.type if arguments else "cpu"
        return max(1, min(BLOCK, NUMBERS_OF_BLOCK.get(device, NUMBERS_OF_BLOCK["cpu"]) // numbers))

    def _block(self, arguments: tuple[Tensor, ...], indices: Tensor) -> tuple[Tensor, ...]:
        """A block of rows of the model's arguments; all of them for a model that subsamples itself."""
        if self.spec.subsamples_itself or not arguments:
            return arguments
        first = int(indices[0])  # its rows follow each other, so that nothing need be copied
        return tuple(item[first : first + len(indices)] for item in arguments)

    def node(self, values: dict[str, Tensor], given: tuple[Tensor, ...], indices: Tensor) -> Node:
        """The response's site on the given arguments of the model, its response left out or not."""
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

    def evaluate(self, of: Of, values: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """``of(law)`` (rows, ...), such as the link parameters of its family, at every row of the inputs."""
        num_rows = len(inputs[0])
        with torch.no_grad():
            blocks = self.blocks(num_rows, self._size(inputs))
            parts = [self._evaluate(of, values, self._block(inputs, rows), rows) for rows in blocks]
        return torch.cat(parts)[:num_rows]

    def _evaluate(self, of: Of, values: dict[str, Tensor], given: tuple[Tensor, ...], indices: Tensor) -> Tensor:
        result = of(unwrapped(self.node(values, given, indices)["fn"]))
        return result.expand(torch.broadcast_shapes(result.shape, (len(indices), *result.shape[1:])))

    def jacobian(
        self,
        of: Of,
        values_of: Callable[[Tensor], dict[str, Tensor]],
        free: Tensor,
        inputs: tuple[Tensor, ...],
    ) -> Tensor:
        """Derivatives (rows, q, len(free)) of ``of(law)`` (rows, q) or (rows,) at ``values_of(free)``.

        Raises:
            ValueError: where a row depends on the others.
        """
        if self.spec.subsamples_itself:  # its batch size is fixed, so it cannot be asked for one row
            blocks = self.blocks(len(inputs[0]), self._size(inputs))
            parts = [
                torch.func.jacrev(lambda z, b=b: self._evaluate(of, values_of(z), inputs, b))(free) for b in blocks
            ]
            whole = torch.cat(parts)[: len(inputs[0])].detach()
            return whole.reshape(len(whole), -1, len(free))

        def of_row(z: Tensor, number: Tensor, *row: Tensor) -> tuple[Tensor, Tensor]:
            result = self._evaluate(of, values_of(z), tuple(item[None] for item in row), number[None]).flatten()
            return result, result

        values = values_of(free)
        together = self.evaluate(of, values, inputs)
        together = together.reshape(len(together), -1)
        held = together.shape[1] * sum(value.numel() for value in values.values())
        gradients = torch.func.jacrev(of_row, has_aux=True)
        chunk = max(1, NUMBERS_AT_ONCE // max(1, held))
        by_row = torch.func.vmap(gradients, in_dims=(None, 0, *[0] * len(inputs)), chunk_size=chunk)
        numbers = torch.arange(len(inputs[0]), device=inputs[0].device)
        try:
            jacobian, alone = by_row(free, numbers, *inputs)
        except RuntimeError:  # PReLU, an LSTM: torch.func cannot do all rows at once
            rows = [gradients(free, *row) for row in zip(numbers, *inputs, strict=True)]
            jacobian, alone = (torch.stack(part) for part in zip(*rows, strict=True))
        if not torch.allclose(alone, together, rtol=1e-4, atol=1e-4 * float(together.abs().max())):
            raise ValueError(
                f"the mean of a row of site '{self.site}' must not depend on the other rows, for an interval"
            )
        result: Tensor = jacobian.detach()
        return result

    def average(
        self,
        of: Of,
        values_of: Callable[[Tensor], dict[str, Tensor]],
        free: Tensor,
        inputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """The average of ``of(law)`` over all rows at ``values_of(free)``, and its derivatives (..., len(free))."""
        num_rows = len(inputs[0])

        def total(z: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
            result = self._evaluate(of, values_of(z), self._block(inputs, block), block)
            # The last block of a model with a size of its own is padded.
            counted = torch.cat([block.new_ones(1, dtype=torch.bool), block[1:] != block[:-1]])
            result = result[counted].sum(0) / num_rows
            return result, result

        parts = [
            torch.func.jacrev(total, has_aux=True)(free, block) for block in self.blocks(num_rows, self._size(inputs))
        ]
        gradient, mean = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        return mean.detach(), gradient.detach()

    def family(self, values: dict[str, Tensor]) -> Family:
        """The family of the response on the rows the model was run with.

        Raises:
            ValueError: for a law of no family known, more than one number a row, or masked rows.
        """
        laws = []
        if not self.spec.data:
            raise ValueError("the model reads its data from outside its arguments, so no intervals are known")
        for indices in self.blocks(len(self.spec.data[0]), self._size(self.spec.data)):
            with torch.no_grad():
                node = self.node(values, self._block(self.spec.data, indices), indices)
            if node["mask"] is not None and node["mask"] is not True:
                raise ValueError(
                    f"intervals need every row, got a masked response at site '{self.site}': leave those rows out"
                )
            laws.append(unwrapped(node["fn"]))
            if not isinstance(laws[0], dist.Normal):
                break  # any row tells; of normal responses all do, which may have one scale or several
        return family_of(laws, self.site)

    def observed(self, values: dict[str, Tensor]) -> Tensor:
        """The response in the rows the model was run with."""
        data = self.spec.data
        with torch.no_grad():
            blocks = self.blocks(len(data[0]), self._size(data))
            parts = [self.node(values, self._block(data, rows), rows)["value"] for rows in blocks]
        return torch.cat(parts)[: len(data[0])]
