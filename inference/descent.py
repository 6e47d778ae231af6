"""Maximum likelihood by batches: SGD with momentum on kept weights alone, for networks that no full-batch method can fit."""

from dataclasses import replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_sparse.inference.inspection import Specification
from pyro_sparse.inference.potential import Potential
from pyro_sparse.inference.program import repays_compiling
from pyro_sparse.inference.schedule import PriorAnnealing
from pyro_sparse.inference.step import Table, step_maker

EPOCHS = 10  # of the paper's refit, section A.6


def short_schedule(schedule: PriorAnnealing, steps_per_epoch: int) -> PriorAnnealing:
    """Ten epochs at the learning rate that a run ended with."""
    last = schedule.at(schedule.num_steps - 1)
    steps = EPOCHS * steps_per_epoch
    return PriorAnnealing(steps, 0, 0, 0, 0, learning_rate=last.learning_rate, friction=last.friction)


def descend(
    spec: Specification,
    start: Tensor,
    kept: Tensor,
    schedule: PriorAnnealing,
    precision: Tensor,
    seed: int,
    progress: bool,
) -> tuple[Tensor, float]:
    """Where SGD on the kept coordinates ends, and the mean loss of the batches of its last tenth.

    All others stay as they are, but for buffers, which the model moves itself.

    Args:
        start, kept, precision: (coordinate,); of the normal prior that stays in.
        schedule: of a train phase alone; its weight decay acts on those of networks.
    """
    layout = spec.layout
    networks = layout.flat({site.name: float(site.kind != "latent") for site in layout.sites}, 0.0, start)
    decayed = kept * (precision / spec.num_data + schedule.weight_decay * networks)
    table = Table(replace(schedule, weight_decay=1.0), start)
    batches = spec.batches(seed, 0, start.device)
    potential = Potential(spec, start, (batches(0), batches(1)))
    compiling = repays_compiling(schedule.num_steps, len(start), start.is_cuda)
    step = step_maker(potential, table, start, seed, [0], compiling, kept, decayed)(start, [0])
    losses, every = [], max(1, schedule.num_steps // 200)
    with tqdm(total=schedule.num_steps, disable=not progress, unit="step", desc="refit") as bar:
        for number in range(schedule.num_steps):
            step(number)
            if number % every == 0 or number == schedule.num_steps - 1:
                losses.append(step.losses()[0])  # which on a card finds out whether all is finite
                bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update()
    last = losses[-max(1, len(losses) // 10) :]
    return step.state.position.clone(), float(torch.tensor(last).mean())
