"""Batches and noise as functions of (seed, chain, step): never of the global generator, so a run resumes without state."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

Augment = Callable[[Tensor, torch.Generator], Tensor]


def stream(seed: int, chain: int, purpose: str) -> int:
    """A 32-bit starting point for one purpose of one chain; neighbouring seeds give unrelated ones."""
    digest = hashlib.blake2b(f"{seed}/{chain}/{purpose}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")


def row_major(data: Tensor) -> Tensor:
    """The data with each row in one piece of memory: from columns, as a data frame has them, batches take 30 times as long."""
    rows, *others = data.stride()
    return data.contiguous() if 0 < rows < max(others, default=0) else data


class Noise:
    """Standard normals of one chain: ``noise(step, out)`` fills ``out``."""

    def __init__(self, seed: int, chain: int, device: torch.device) -> None:
        self._start = stream(seed, chain, "noise")
        self._generator = torch.Generator(device)

    def __call__(self, step: int, out: Tensor) -> Tensor:
        self._generator.manual_seed((self._start + step) % 2**32)
        return out.normal_(generator=self._generator)


class Batches:
    """Row numbers of the batch of a step, ``batches(step)``: each epoch is one permutation, its remainder left out.

    With ``batch_size`` None every batch is all rows, in order. Averaged over an epoch the gradient is exactly the full
    one where ``batch_size`` divides ``num_data``; each batch alone is unbiased always.
    """

    def __init__(
        self,
        num_data: int,
        batch_size: int | None,
        seed: int,
        chain: int,
        device: torch.device,
        purpose: str = "batches",
    ) -> None:
        self.num_data, self.batch_size = num_data, batch_size
        self._start = stream(seed, chain, purpose)
        self._device = device
        self._generator = torch.Generator()
        self._epoch = -1
        self._order = torch.arange(num_data, device=device)

    def __call__(self, step: int) -> Tensor:
        if self.batch_size is None:
            return self._order
        epoch, number = divmod(step, self.num_data // self.batch_size)
        if epoch != self._epoch:
            self._generator.manual_seed((self._start + epoch) % 2**32)
            order = torch.randperm(self.num_data, generator=self._generator)
            pinned = order.pin_memory() if self._device.type == "cuda" else order  # the copy then waits for nothing
            self._order = pinned.to(self._device, non_blocking=True)
            self._epoch = epoch
        return self._order[number * self.batch_size : (number + 1) * self.batch_size]


class AugmentedBatches:
    """The rows of batches, the first of the data changed at random, ``batches(step)``: a function of (seed, chain, step)."""

    def __init__(
        self, batches: Batches, data: tuple[Tensor, ...], augment: Augment, seed: int, chain: int, purpose: str
    ) -> None:
        self._batches, self._data, self._augment = batches, data, augment
        self._start = stream(seed, chain, f"augmented {purpose}")
        self._generator = torch.Generator(data[0].device)

    def __call__(self, step: int) -> tuple[Tensor, ...]:
        """The batch of a step.

        Raises:
            ValueError: where ``augment`` returns something of another form than it was given.
        """
        indices = self._batches(step)
        first, *others = (item.index_select(0, indices) for item in self._data)
        self._generator.manual_seed((self._start + step) % 2**32)
        changed = self._augment(first, self._generator)
        if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (first.shape, first.dtype):
            got = f"{changed.dtype} {tuple(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(
                f"augment must return a tensor as it was given, {first.dtype} {tuple(first.shape)}, got {got}"
            )
        return (changed, *others)


class LoaderBatches:
    """Batches of a DataLoader, ``batches(step)``: tensors on a device, the arguments of the model.

    A short last batch of an epoch is left out. What the loader draws from PyTorch's generators, the global one or its own, is a
    function of (seed, chain, epoch, step), and both are as before afterwards. Steps are asked for in order; one that is not is
    found by going through its epoch.
    """

    def __init__(self, loader: "DataLoader[Any]", seed: int, chain: int, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._start = stream(seed, chain, "loader")
        self._of_epoch = batches_of_epoch(loader)
        self._epoch, self._next = -1, 0
        self._rows: Iterator[Any] = iter(())
        self._held: dict[int, tuple[Tensor, ...]] = {}
        self._like: tuple[Tensor, ...] | None = None

    def __call__(self, step: int) -> tuple[Tensor, ...]:
        """The batch of a step.

        Raises:
            ValueError: where it is of another form than the first; the loader's own errors, with a note on where it was.
        """
        if step not in self._held:
            epoch, number = divmod(step, self._of_epoch)
            if epoch != self._epoch or number < self._next:
                self._epoch, self._next, self._rows = epoch, 0, iter(())
            while self._next <= number:
                batch = self._fetch(epoch * self._of_epoch + self._next)
                self._next += 1
            self._held[step] = batch
            self._held = dict(list(self._held.items())[-2:])
        return self._held[step]

    def _fetch(self, step: int) -> tuple[Tensor, ...]:
        with self._generators(self._next == 0, step):
            try:
                if self._next == 0:
                    self._rows = iter(self._loader)
                batch = next(self._rows)
            except Exception as error:
                error.add_note(
                    f"raised by the DataLoader, asked for batch {self._next} of epoch {self._epoch} (step {step})"
                )
                raise
        parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise TypeError(f"the DataLoader must give tensors, the arguments of the model, got {kinds}")
        self._like = parts if self._like is None else self._like
        found, expected = ([(part.dtype, part.shape) for part in of] for of in (parts, self._like))
        if found != expected:
            raise ValueError(
                f"every batch of the DataLoader must be as its first, {expected}, got {found} at step {step}"
            )
        return tuple(part.to(self._device, non_blocking=True) for part in parts)

    @contextlib.contextmanager
    def _generators(self, first: bool, step: int) -> Iterator[None]:
        """Seeded for one batch: the global generator, and at the start of an epoch those the loader was given."""
        given = self._loader.generator, getattr(_sampler(self._loader), "generator", None)
        own = {id(generator): generator for generator in given if generator is not None}
        states = [generator.get_state() for generator in own.values()] if first else []
        with torch.random.fork_rng([]), torch.device("cpu"):
            torch.default_generator.manual_seed((self._start + step) % 2**32)  # the CPU's, which alone is restored
            for generator in own.values() if first else ():
                generator.manual_seed((self._start + self._epoch) % 2**32)
            try:
                yield
            finally:
                for generator, state in zip(own.values() if first else (), states, strict=True):
                    generator.set_state(state)


def rows_of(loader: "DataLoader[Any]") -> int:
    """Rows of one pass, which plates must have: of a sampler of some rows, those.

    Raises:
        ValueError: of a loader whose rows cannot be counted, or do not come once each.
    """
    sampler = _sampler(loader)
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        raise ValueError(f"data must be a DataLoader that gives each row once an epoch, got a {type(sampler).__name__}")
    if loader.persistent_workers:
        raise ValueError(
            "data must be a DataLoader whose workers are seeded anew each epoch, got persistent_workers=True"
        )
    try:
        return len(loader.dataset if isinstance(sampler, DistributedSampler) else sampler)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            "data must be a DataLoader of a dataset that has a length: plates need the number of rows"
        ) from None


def batches_of_epoch(loader: "DataLoader[Any]") -> int:
    """Full batches of one pass.

    Raises:
        ValueError: of a loader of no batches, or whose rows are fewer than a batch.
    """
    num_rows, batches = rows_of(loader), loader.batch_sampler
    if batches is None:
        raise ValueError("data must be a DataLoader that makes batches, got batch_size=None")
    size, number = getattr(batches, "batch_size", None), len(loader)
    if size is not None and not getattr(batches, "drop_last", True) and len(_sampler(loader)) % size:
        number -= 1
    if number < 1:
        raise ValueError(f"data must give at least one full batch, got {num_rows} rows for batches of {size}")
    return number


def _sampler(loader: "DataLoader[Any]") -> Any:
    """Where the row numbers come from."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def augment_name(augment: Augment | None) -> str | None:
    """What tells one augmentation from another, in every process."""
    if augment is None:
        return None
    return getattr(augment, "__qualname__", None) or re.sub(" at 0x[0-9a-f]+", "", repr(augment))
