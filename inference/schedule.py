"""How the target moves: prior annealing as a schedule of controls, Algorithm 1 and sections 3.1 and A.6 of the paper."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

from pyro_sparse.inference.warning import warn
from pyro_sparse.models.spike_slab import SpikeSlab

PHASES = ("train", "power", "spike", "cool", "sample")


class Controls(NamedTuple):
    """What a step is told: the sampler's settings and the target's, all plain numbers."""

    learning_rate: float  # acts on the mean loss U / N
    friction: float  # alpha; the momentum is 1 - alpha
    temperature: float  # tau
    prior_power: float  # eta
    spike_progress: float  # u
    weight_decay: float  # gradient of weight_decay / 2 * |weights|² on the mean loss


@dataclass(frozen=True)
class PriorAnnealing:
    """Train, raise the prior, narrow the spike, cool to a mode or sample a posterior.

    ====== ============== ================ =====================
    phase  prior power    spike progress   temperature
    ====== ============== ================ =====================
    train  0              0                0
    power  0 to 1         0                ``temperature``
    spike  1              0 to 1           ``temperature``
    cool   1              1                ``temperature / t``
    sample 1              1                ``sample_temperature``
    ====== ============== ================ =====================

    Args:
        train_steps, power_steps, spike_steps, cool_steps, sample_steps: lengths of the phases, >= 0. A long train phase
            overfits where inputs are many, and weights that have left the spike by then stay out of it. Draws come from the
            last one: after cooling they surround a mode, after sampling they are a posterior.
        learning_rate: step on the mean loss U / N, > 0; the paper's epsilon_t.
        friction: in (0, 1]; the momentum is ``1 - friction``.
        temperature: tau while the prior is annealed, >= 0.
        sample_temperature: tau of the sampling phase, >= 0; 1 is the posterior itself.
        weight_decay: on the mean loss, in the train phase only, >= 0.
        learning_rate_drops: steps at which the learning rate is divided by ten.
        cool_period: steps for which a temperature of the cooling phase holds (an epoch, say), >= 1.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """

    train_steps: int = 1_000
    power_steps: int = 4_000
    spike_steps: int = 10_000
    cool_steps: int = 5_000
    sample_steps: int = 0
    learning_rate: float = 4e-3
    friction: float = 0.1
    temperature: float = 0.1
    sample_temperature: float = 1.0
    weight_decay: float = 0.0
    learning_rate_drops: tuple[int, ...] = ()
    cool_period: int = 1

    def __post_init__(self) -> None:
        for phase in PHASES:
            steps = getattr(self, f"{phase}_steps")
            _require(f"{phase}_steps", steps, steps >= 0 and steps % 1 == 0, "be an integer >= 0")
        for name in ("temperature", "sample_temperature", "weight_decay"):
            _require(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "be finite and >= 0")
        _require("learning_rate", self.learning_rate, 0 < self.learning_rate < math.inf, "be finite and > 0")
        _require("friction", self.friction, 0 < self.friction <= 1, "lie in (0, 1]")
        period = self.cool_period
        _require("cool_period", period, period >= 1 and period % 1 == 0, "be an integer >= 1")
        _require("num_steps", self.num_steps, self.num_steps >= 1, "be >= 1 over all phases")
        drops = self.learning_rate_drops
        whole = isinstance(drops, (tuple, list)) and all(step >= 0 and step % 1 == 0 for step in drops)
        _require("learning_rate_drops", drops, whole, "be a tuple of steps, integers >= 0")
        for field in fields(self):  # numbers of other libraries as Python's, which JSON knows
            value = getattr(self, field.name)
            if field.name == "learning_rate_drops":
                kept: Any = tuple(int(step) for step in value)
            else:
                kept = int(value) if field.name == "cool_period" or field.name.endswith("_steps") else float(value)
            object.__setattr__(self, field.name, kept)

    @classmethod
    def paper_regression(cls) -> Self:
        """The regression experiment of section A.6: 80,000 steps."""
        return cls(5_000, 15_000, 40_000, 20_000, learning_rate=1e-3)

    @classmethod
    def paper_cifar(cls, steps_per_epoch: int, num_epochs: int = 300, sample: bool = False) -> Self:
        """The CIFAR-10 experiment of section A.6, with weight decay 5e-4 while training as in its scripts.

        Args:
            steps_per_epoch: batches in one pass over the data, >= 1.
            num_epochs: the paper's 300, or another number that its phases are shortened or lengthened to, >= 12: half of them
                train, a sixth raises the prior, a twelfth narrows the spike, the last quarter cools.
            sample: the Bayesian version, whose last quarter samples at the annealing temperature, 0.01, so that draws (one an
                epoch: ``num_draws = num_epochs // 4``) can be averaged.
        """
        if not steps_per_epoch >= 1 or not num_epochs >= 12:
            raise ValueError(
                f"steps_per_epoch must be >= 1 and num_epochs >= 12, got {steps_per_epoch} and {num_epochs}"
            )
        ends = [steps_per_epoch * round(num_epochs * share) for share in (1 / 2, 2 / 3, 3 / 4, 1)]
        train, power, spike, last = (end - begin for begin, end in itertools.pairwise([0, *ends]))
        return cls(
            *(train, power, spike, 0 if sample else last, last if sample else 0),
            learning_rate=0.1,
            temperature=0.01,
            sample_temperature=0.01,
            weight_decay=5e-4,
            learning_rate_drops=(ends[0], ends[2]),
            cool_period=steps_per_epoch,
        )

    @classmethod
    def images(cls, steps_per_epoch: int, num_epochs: int = 300, learning_rate: float = 0.1) -> Self:
        """The Bayesian version of :meth:`paper_cifar` with the learning rate held until the spike is narrow.

        In a short run (5,000 images, 36 epochs) a residual network with a tenth of its weights loses 5 points of accuracy
        so, and 22 at the paper's rates (``benchmarks/image_ablation.py``); of 300 epochs it is not known. The rate of the
        sampling phase, a tenth, is one at which draws differ. The spike phase goes on for a 36th of the run at that rate,
        for ``keep`` to reach its share at it: weights that the larger rate holds in the spike may leave it at the smaller.

        Args:
            steps_per_epoch, num_epochs: as of :meth:`paper_cifar`.
            learning_rate: the first one, a tenth of it while sampling; 0.1 suits residual networks, small plain ones may
                learn nothing at it and want 0.02.
        """
        schedule = cls.paper_cifar(steps_per_epoch, num_epochs, sample=True)
        settling = steps_per_epoch * max(1, round(num_epochs / 36))
        return replace(
            schedule,
            spike_steps=schedule.spike_steps + settling,
            sample_steps=schedule.sample_steps - settling,
            learning_rate=learning_rate,
            learning_rate_drops=schedule.learning_rate_drops[1:],
        )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Inverse of :func:`dataclasses.asdict`, from JSON too."""
        given: dict[str, Any] = dict(settings)
        return cls(**given | {"learning_rate_drops": tuple(given["learning_rate_drops"])})

    def length(self, phase: str) -> int:
        """Steps of a phase."""
        return int(getattr(self, f"{phase}_steps"))

    @property
    def num_steps(self) -> int:
        """Steps of all phases together."""
        return sum(self.length(phase) for phase in PHASES)

    @property
    def last_phase(self) -> str:
        """The phase that draws are kept from."""
        return next(phase for phase in reversed(PHASES) if self.length(phase) > 0)

    def phase(self, step: int) -> tuple[str, int]:
        """The phase of a step counted from 0, and the step within it."""
        _require("step", step, 0 <= step < self.num_steps, f"lie in [0, {self.num_steps})")
        for phase in PHASES:
            if step < self.length(phase):
                return phase, step
            step -= self.length(phase)
        raise AssertionError("unreachable: the phases add up to num_steps")

    def at(self, step: int) -> Controls:
        """The controls of a step counted from 0."""
        phase, since = self.phase(step)
        before_cooling = phase in ("train", "power", "spike")
        temperature = {
            "train": 0.0,
            "cool": self.temperature / (since // self.cool_period + 1),
            "sample": self.sample_temperature,
        }.get(phase, self.temperature)
        return Controls(
            learning_rate=self.learning_rate * 0.1 ** sum(step >= drop for drop in self.learning_rate_drops),
            friction=self.friction,
            temperature=temperature,
            prior_power={"train": 0.0, "power": since / max(self.power_steps, 1)}.get(phase, 1.0),
            spike_progress=since / self.spike_steps if phase == "spike" else 0.0 if before_cooling else 1.0,
            weight_decay=self.weight_decay if phase == "train" else 0.0,
        )

    def stability(self, law: SpikeSlab, num_data: int) -> float:
        """Largest ``learning_rate / num_data * prior_power / spike_scale²`` of the run; must stay under 2 (2 - friction)."""
        # Within a phase and between two drops the ratio can only rise, so its last steps are enough.
        ends = {*itertools.accumulate(map(self.length, PHASES)), *self.learning_rate_drops}
        ratios = []
        for step in sorted(end - 1 for end in ends if 0 < end <= self.num_steps):
            now = self.at(step)
            narrowest = float(law.at(now.spike_progress).current_spike_scale.min())
            ratios.append(now.learning_rate / num_data * now.prior_power / narrowest**2)
        return max(ratios)

    def check_stability(self, laws: Mapping[str, SpikeSlab], num_data: int) -> None:
        """Raises or warns where a spike is too narrow for the step: a quadratic of curvature k needs epsilon k < 2 (2 - alpha).

        Raises:
            ValueError: above the bound; a warning above a tenth of it, with how much too wide the spike is sampled.
        """
        if not laws:
            return
        bound = 2 * (2 - self.friction)
        site, ratio = max(((s, self.stability(law, num_data)) for s, law in laws.items()), key=lambda pair: pair[1])
        text = (
            f"learning_rate / num_data / spike_scale² reaches {ratio:.3g} at site '{site}' (num_data {num_data}); "
            f"{{}} {bound:.3g} = 2 (2 - friction): lower learning_rate or raise spike_scale"
        )
        if not ratio < bound:
            raise ValueError(text.format("it must stay under"))
        if ratio > bound / 10:
            excess = 100 / (1 - ratio / bound) - 100
            warn(text.format(f"the spike is sampled {excess:.0f} % too wide in variance, and diverges at"))


def _require(name: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} must {rule}, got {value}")
