"""The training step that all methods share: SGD with momentum on one flat vector of weights, under a mask.

Rows, order of the batches, augmentation, network, momentum and weight decay are those of our own runs: batches are
functions of (seed, step), as in ``pyro_sparse.anneal``. Learning rates are the paper's, divided by ten at 1/2 and 3/4 of
the run, unless a recipe says otherwise; ours hold the first one up to 3/4 (``PriorAnnealing.images``). A method is a
``Policy``: what the first mask is, whether the weights that it leaves out go on learning, and what happens after a step.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_sparse.inference.minibatch import Augment, AugmentedBatches, Batches, stream
from pyro_sparse.inference.step import captured

Images = tuple[Tensor, Tensor]

SAVE_SECONDS = 60  # between two saves of a training on its way


class OutOfTimeError(Exception):
    """The deadline came; what was there is saved."""


@dataclass(frozen=True)
class Recipe:
    """How long and how fast: the learning rate is divided by ten at each of ``drops``, shares of the run."""

    epochs: int
    batch: int
    rate: float
    drops: tuple[float, ...] = (0.5, 0.75)
    momentum: float = 0.9
    weight_decay: float = 5e-4

    def rate_at(self, share: float) -> float:
        return self.rate * 0.1 ** sum(share >= drop for drop in self.drops)


@dataclass(frozen=True)
class Problem:
    """What every method is given.

    Attributes:
        network: with fresh weights of a seed, on the device of the images.
        logits: of a network for images, in single precision.
        keep: the share of all parameters to keep, those of BatchNorm and biases counted.
        folder: for what is on its way; None keeps nothing.
        deadline: by ``time.monotonic``.
    """

    network: Callable[[int], nn.Module]
    logits: Callable[[nn.Module, Tensor], Tensor]
    train: Images
    augment: Augment | None
    recipe: Recipe
    keep: float
    folder: Path | None = None
    deadline: float = math.inf

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train[0]) // self.recipe.batch

    @property
    def num_steps(self) -> int:
        return self.steps_per_epoch * self.recipe.epochs


class Policy:
    """Which weights are kept: here all of them, from the first step to the last.

    Attributes:
        feedback: whether weights that the mask leaves out are updated too; else they are zero.
    """

    feedback = False

    def start(self, training: "Training") -> None:
        """Sets the first mask, and tensors of its own in ``training.extra``."""

    def gradient(self, training: "Training", number: int) -> None:
        """Changes ``training.gradient`` of the step ``number`` before weight decay and momentum see it."""

    def after(self, training: "Training", number: int) -> None:
        """Changes the mask after that step."""


class Training:
    """A network whose weights are one vector.

    Attributes:
        net: it computes with ``seen``.
        weights, momentum, gradient: (coordinate,), all of them dense.
        mask: (coordinate,) booleans, True where kept.
        seen: ``weights`` where kept, else 0; each parameter of ``net`` is a part of it.
        gradient: of the mean loss of the batch at ``seen``, in all coordinates.
        layers: the parts of the vector that may be pruned, those of layers' weights; biases and BatchNorm stay.
        extra: what else a policy must remember.
    """

    def __init__(self, problem: Problem, policy: Policy, seed: int) -> None:
        self.problem, self.policy, self.seed, self.number = problem, policy, seed, 0
        self.net = problem.network(seed).train()
        parameters = list(self.net.parameters())
        self.seen = torch.cat([part.detach().reshape(-1) for part in parameters])
        self.weights, self.momentum = self.seen.clone(), torch.zeros_like(self.seen)
        self.gradient, self.mask = torch.zeros_like(self.seen), torch.ones_like(self.seen, dtype=torch.bool)
        self.layers: list[slice] = []
        end = 0
        for part in parameters:
            begin, end = end, end + part.numel()
            part.data = self.seen[begin:end].view_as(part)
            part.grad = self.gradient[begin:end].view_as(part)
            self.layers += [slice(begin, end)] * (part.dim() > 1)
        self.extra: dict[str, Tensor] = {}
        batches = Batches(len(problem.train[0]), problem.recipe.batch, seed, 0, self.seen.device)
        self.batches = AugmentedBatches(batches, problem.train, problem.augment or _as_it_is, seed, 0, "batches")
        self.loss = self.seen.new_zeros(())
        self._backward: Callable[[Tensor, Tensor], None] = self.backward
        self.seconds = self.cpu_seconds = 0.0
        self._identity = "" if problem.folder is None else identity(problem, self.seen)
        policy.start(self)

    @property
    def wanted(self) -> int:
        """How many of the layers' weights are kept where ``keep`` of all parameters is."""
        others = len(self.mask) - self.num_layer_weights
        wanted = round(self.problem.keep * len(self.mask)) - others
        if not wanted > 0:
            raise ValueError(f"keep must leave weights beside the {others} biases and scales, got {self.problem.keep}")
        return wanted

    @property
    def num_layer_weights(self) -> int:
        return sum(part.stop - part.start for part in self.layers)

    @property
    def share(self) -> float:
        """Over, in [0, 1]."""
        return self.number / self.problem.num_steps

    def layer_coordinates(self) -> Tensor:
        """(layer weight,) their places in the vector."""
        device = self.seen.device
        return torch.cat([torch.arange(part.start, part.stop, device=device) for part in self.layers])

    def generator(self, purpose: str) -> torch.Generator:
        """A function of the seed, the purpose and the step."""
        start = (stream(self.seed, 0, purpose) + self.number) % 2**32
        return torch.Generator(self.seen.device).manual_seed(start)

    def keep_only(self, mask: Tensor) -> None:
        """Takes a mask, and makes the weights that it leaves out zero unless they go on learning."""
        self.mask = mask
        if not self.policy.feedback:
            self.weights.mul_(mask)

    def backward(self, images: Tensor, labels: Tensor) -> None:
        """Gradient and loss of one batch, at ``seen``."""
        self.gradient.zero_()
        loss = nn.functional.cross_entropy(self.problem.logits(self.net, images), labels)
        loss.backward()
        self.loss.copy_(loss.detach())

    def step(self) -> None:
        """One step of SGD.

        .. math:: v \\leftarrow \\mu v + \\nabla L(m \\odot w) + \\delta w, \\quad w \\leftarrow w - \\epsilon v
        """
        recipe = self.problem.recipe
        torch.mul(self.weights, self.mask, out=self.seen)
        self._backward(*self.batches(self.number))
        self.policy.gradient(self, self.number)
        self.momentum.mul_(recipe.momentum).add_(self.gradient).add_(self.weights, alpha=recipe.weight_decay)
        self.weights.add_(self.momentum, alpha=-recipe.rate_at(self.share))
        if not self.policy.feedback:
            self.weights.mul_(self.mask)
        self.number += 1
        self.policy.after(self, self.number - 1)

    def run(self, name: str) -> "Training":
        """All steps that are left.

        What ``problem.folder`` keeps of the same training, of this very problem, is gone on with.

        Raises:
            OutOfTimeError: at the deadline, after saving.
            ArithmeticError: where the last loss is not finite.
        """
        folder, num_steps = self.problem.folder, self.problem.num_steps
        path = None if folder is None else folder / f"{name}-{self.seed}-{self._identity}.pt"
        if path is not None and path.exists():
            self.load(path)
        if self.seen.is_cuda and self.number < num_steps:
            self.capture()
        begun = saved = time.perf_counter()
        spent = (self.seconds - begun, self.cpu_seconds - time.process_time())
        while self.number < num_steps:
            self.step()
            now = time.perf_counter()
            late = time.monotonic() > self.problem.deadline and self.number < num_steps
            if late or now - saved > SAVE_SECONDS or self.number == num_steps:
                loss = float(self.loss)  # which waits for a card to end its work
                if not math.isfinite(loss):
                    raise ArithmeticError(f"{name} has a loss of {loss} at step {self.number} of {num_steps}")
                torch.mul(self.weights, self.mask, out=self.seen)
                self.seconds, self.cpu_seconds = spent[0] + time.perf_counter(), spent[1] + time.process_time()
                self.save(path)
                saved = now
            if late:
                raise OutOfTimeError(f"{name} at step {self.number} of {num_steps}")
        torch.mul(self.weights, self.mask, out=self.seen)
        self._backward = self.backward  # a captured graph keeps its memory
        self.net.eval()
        return self

    def capture(self) -> None:
        """Forward and backward as one CUDA graph: a small network's kernels take less time than their launches."""
        buffers = [buffer.clone() for buffer in self.net.buffers()]
        images, labels = (item.clone() for item in self.batches(self.number))
        replay = captured(lambda: self.backward(images, labels), self.seen.device)
        for buffer, value in zip(self.net.buffers(), buffers, strict=True):
            buffer.copy_(value)

        def replayed(some: Tensor, of: Tensor) -> None:
            images.copy_(some)
            labels.copy_(of)
            replay()

        self._backward = replayed

    def state(self) -> dict[str, Any]:
        """What the next step needs."""
        buffers = {name: value for name, value in self.net.named_buffers() if value.numel()}
        counts = {"number": self.number, "seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        own = {"weights": self.weights, "momentum": self.momentum, "mask": self.mask}
        return counts | own | {"buffers": buffers, "extra": self.extra}

    def save(self, path: Path | None) -> None:
        """At once or not at all."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.state(), path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)

    def load(self, path: Path) -> None:
        """What :meth:`save` wrote; executes nothing."""
        state = torch.load(path, map_location=self.seen.device, weights_only=True)
        self.number, self.seconds, self.cpu_seconds = (state[name] for name in ("number", "seconds", "cpu_seconds"))
        # Single numbers of a policy stay where it made them, on the CPU: it asks for them each step.
        self.extra = {name: value.cpu() if value.dim() == 0 else value for name, value in state["extra"].items()}
        for name in ("weights", "momentum", "mask"):
            getattr(self, name).copy_(state[name])
        for name, buffer in self.net.named_buffers():
            if name in state["buffers"]:
                buffer.copy_(state["buffers"][name])

    def state_bytes(self) -> int:
        """Memory that stays between two steps, the images apart."""
        own = [self.weights, self.seen, self.momentum, self.gradient, self.mask, *self.net.buffers()]
        return sum(item.numel() * item.element_size() for item in [*own, *self.extra.values()])


def identity(problem: Problem, first: Tensor) -> str:
    """Of what a training is of: data, recipe, share, first weights, device."""
    settings = (problem.recipe, problem.keep, problem.augment, torch.get_num_threads())
    device = torch.cuda.get_device_name(first.device) if first.is_cuda else "cpu"
    digest = hashlib.blake2b(repr((settings, device)).encode(), digest_size=6)
    for item in (*problem.train, first):
        digest.update(item.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _as_it_is(images: Tensor, _: torch.Generator) -> Tensor:
    return images


def largest(values: Tensor, count: int) -> Tensor:
    """(value,) booleans: exactly ``count`` of them, the largest; of equal ones the first."""
    found = torch.zeros_like(values, dtype=torch.bool)
    order = values.sort(descending=True, stable=True).indices
    found[order[:count]] = True
    return found


def shares(total: int, weights: list[float], room: list[int]) -> list[int]:
    """A whole number for each, in proportion to ``weights`` as far as there is ``room``, that add up to ``total``.

    What one has no room for goes to the others in the same proportions; what rounding leaves goes, one each, to those of the
    largest remainder.
    """
    if total > sum(room):
        raise ValueError(f"total must be at most the room, {sum(room)}, got {total}")
    given = [0.0] * len(room)
    open_ = [place for place, free in enumerate(room) if free > 0]
    left = float(total)
    while left > 1e-9 and open_:
        scale = sum(weights[place] for place in open_)
        parts = {p: left * (weights[p] / scale if scale > 0 else 1 / len(open_)) for p in open_}
        full = [p for p in open_ if given[p] + parts[p] >= room[p]]
        for p in full or open_:
            taken = room[p] - given[p] if full else parts[p]
            given[p] += taken
            left -= taken
        open_ = [p for p in open_ if p not in full] if full else []
    whole = [math.floor(value + 1e-9) for value in given]
    by_remainder = sorted(range(len(room)), key=lambda p: whole[p] - given[p])
    for place in by_remainder[: total - sum(whole)]:
        whole[place] += 1
    return whole


@dataclass(frozen=True)
class Fitted:
    """What a method hands back.

    Attributes:
        networks: those whose probabilities are averaged, one after the other, each ready to predict.
        trainings: all that it took.
        note: settings worth knowing.
    """

    networks: Callable[[], Iterator[nn.Module]]
    trainings: list[Training]
    kept: float
    note: str = ""


def single(training: Training, note: str = "") -> Fitted:
    """One network as it is, with the share of its parameters that are not zero by its mask."""
    return Fitted(lambda: iter([training.net]), [training], float(training.mask.double().mean()), note)


@torch.no_grad()
def probabilities(problem: Problem, fitted: Fitted, images: Tensor, rows: int = 1_000) -> Tensor:
    """(image, class): softmax averaged over the networks, in double precision."""
    total, count = torch.zeros((), dtype=torch.float64, device=images.device), 0
    for net in fitted.networks():
        parts = [problem.logits(net, some).double().softmax(1) for some in images.split(rows)]
        total, count = total + torch.cat(parts), count + 1
    return total / count
