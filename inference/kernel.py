"""SGHMC as a kernel of pyro.infer.MCMC, for those who bring their own loop: one temperature, no annealing."""

from collections.abc import Mapping
from typing import Any

import torch
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor
from torch.distributions import Transform, identity_transform

from pyro_sparse.inference import sghmc
from pyro_sparse.inference.inspection import Model, inspect, start, warn_of_scale
from pyro_sparse.inference.minibatch import Noise
from pyro_sparse.inference.potential import Potential, Tempering
from pyro_sparse.inference.schedule import Controls


class SGHMC(MCMCKernel):
    """Minibatch stochastic gradient Hamiltonian Monte Carlo for ``pyro.infer.MCMC``.

    It targets exp(-U / temperature), with U the potential of the whole data, batches weighed by the model's plate.
    To temper the prior as well, wrap the model: ``SGHMC(ps.annealed(0.5, 0.2)(model), ...)``.

    Args:
        model: any Pyro model with continuous latent sites.
        step_size: epsilon, the step on U itself (a learning rate divided by the number of rows), > 0.
        friction: alpha, in (0, 1].
        temperature: tau, >= 0.
        batch_size: rows a step; None is all of them.
        num_steps: steps between two samples, >= 1 (thinning).

    Raises:
        ValueError: naming the argument, the rule and the value.

    Each chain has noise and batches of its own, as functions of the seed of the global generator (``pyro.set_rng_seed``).
    Source: Chen, Fox and Guestrin (2014), as in the paper's experiments.
    """

    def __init__(
        self,
        model: Model,
        step_size: float,
        friction: float = 0.1,
        temperature: float = 1.0,
        batch_size: int | None = None,
        num_steps: int = 1,
    ) -> None:
        for name, value, holds, rule in (
            ("step_size", step_size, step_size > 0, "be > 0"),
            ("friction", friction, 0 < friction <= 1, "lie in (0, 1]"),
            ("temperature", temperature, temperature >= 0, "be >= 0"),
            ("num_steps", num_steps, num_steps >= 1, "be >= 1"),
        ):
            if not holds:
                raise ValueError(f"{name} must {rule}, got {value}")
        self.model = model
        self.step_size, self.friction, self.temperature = step_size, friction, temperature
        self.batch_size, self.num_steps = batch_size, num_steps
        self.transforms: dict[str, Transform] | None = None
        self._seed_at_construction = torch.initial_seed()
        self._num_setups = 0
        self._initial_params: dict[str, Tensor] | None = None
        self.cleanup()

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Inspects and traces the model; called by the driver once a chain."""
        if kwargs:
            raise TypeError(f"the model's arguments must be given by position, got {sorted(kwargs)}")
        # Chains run one after another share this object, chains in workers have seeds counted from the first one's.
        chain = (torch.initial_seed() - self._seed_at_construction) + self._num_setups
        self._num_setups += 1
        seed = self._seed_at_construction
        self._spec = inspect(self.model, args, self.batch_size, seed)
        warn_of_scale(self._spec, seed)
        self._layout = self._spec.layout
        position = start(self._spec, seed, chain, fresh=False)
        if self._initial_params is not None:
            position = self._flat(self._initial_params)
        self._state = sghmc.init(position)
        self._noise = Noise(seed, chain, position.device)
        self._batches = self._spec.batches(seed, chain, position.device)
        self._potential = Potential(self._spec, position, (self._batches(0), self._batches(1)))
        self._tempering: Tempering = self._potential.tempering(1.0, 1.0, self.temperature, position)
        self._controls = Controls(self.step_size * self._spec.num_data, self.friction, self.temperature, 1.0, 1.0, 0.0)
        self._initial = {site.name: part for site, part in self._layout.parts(position)}
        self.transforms = {s.name: (s.transform or identity_transform).inv for s in self._layout.sites}

    def cleanup(self) -> None:
        """Forgets the chain; may be called more than once."""
        self._step = 0
        self._potential_energy = float("nan")

    @property
    def initial_params(self) -> dict[str, Tensor]:
        """Start values of all sites on the unconstrained scale."""
        return self._initial

    @initial_params.setter
    def initial_params(self, params: Mapping[str, Tensor]) -> None:
        self._initial_params = dict(params)

    def sample(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``num_steps`` steps from ``params``, unconstrained values by site; the momentum is carried along."""
        self._state = self._state._replace(position=self._flat(params))
        for _ in range(self.num_steps):
            position = self._state.position
            evaluation = self._potential(position, self._tempering, self._batches(self._step))
            self._potential_energy = float(evaluation.mean_potential) * self._spec.num_data
            if not bool(evaluation.mean_gradient.isfinite().all()):
                raise ArithmeticError(
                    f"the gradient became NaN or infinite at step {self._step}: lower step_size ({self.step_size:g})"
                )
            noise = self._noise(self._step, torch.empty_like(position)) if self.temperature > 0 else None
            new = sghmc.step(self._state, evaluation.mean_gradient, noise, self._controls, self._spec.num_data)
            self._state = sghmc.with_buffers(new, evaluation.buffers) if self._layout.num_buffers else new
            self._step += 1
        return {site.name: part.clone() for site, part in self._layout.parts(self._state.position)}

    def _flat(self, params: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([params[site.name].reshape(-1) for site in self._layout.sites])

    def logging(self) -> dict[str, str]:
        """What the progress bar of the driver shows."""
        return {"step size": f"{self.step_size:.2e}", "potential": f"{self._potential_energy:.2f}"}

    def diagnostics(self) -> dict[str, Any]:
        """SGHMC has no divergences to report; the driver expects the key."""
        return {"divergences": {}}
