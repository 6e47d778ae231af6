"""Marginal inclusion probabilities and the structure they select: section 2.1 and Algorithm 1, step (iii), of the paper."""

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from pyro_sparse.inference.layout import named_dims
from pyro_sparse.inference.run import Run
from pyro_sparse.inference.store import StoredDraws, each_block
from pyro_sparse.inference.structure import Structure, live_inputs, prune
from pyro_sparse.inference.trace import input_coords


def mipp(run: Run) -> xr.Dataset:
    """Marginal inclusion posterior probability of every spike-and-slab weight and of every input.

    A weight's is the mean over the draws of the sampling phase of its inclusion probability at the final spike scale;
    where the run ends by cooling it is that of the last position. It is almost 0 or 1 within one run: how sure one is of
    an input is its frequency over independent runs (``num_chains``), which is what ``input`` holds: the share of draws, or
    of chains after cooling, in which a live path leaves it.

    Returns:
        One variable a site, dims ("chain", ...), and ``input``, dims ("column",), whose coordinates are the input names.
        Units are not matched between chains, so weights of different chains must not be averaged:
        ``ps.mipp(ps.matched(run)).mean("chain")`` is their average after matching.
    """
    if not isinstance(run, Run):
        raise TypeError(f"run must be a Run of anneal, got {type(run).__name__}")
    draws = _draws_of_structure(run)
    of_chains = [_inclusion(run, draws, chain) for chain in range(draws.shape[0])]
    dims = named_dims({site.name: site.shape for site in run.spec.layout.sites})
    variables = {
        site.name: (("chain", *dims[site.name]), np.stack([found[site.name].cpu().numpy() for found in of_chains]))
        for site in run.spec.layout.spike_slab_sites()
    }
    coords = {"chain": np.arange(len(of_chains))} | input_coords(run.spec, run.input_names)
    dataset = xr.Dataset(variables, coords=coords)
    share = _input_probability(run, draws)
    names = np.arange(len(share)) if run.input_names is None else np.array(run.input_names)[: len(share)]
    return dataset.assign(input=("column", share.numpy())).assign_coords(column=names)


def select(run: Run, min_probability: float = 0.5) -> Structure:
    """The structure of weights whose MIPP exceeds ``min_probability``, without what cannot act.

    Of several chains the one with the lowest mean loss over its last draws is used: their units are not matched.

    Args:
        min_probability: in (0, 1).

    Raises:
        ValueError: where it lies outside, and for a model without a spike-and-slab site.
    """
    if not isinstance(run, Run):
        raise TypeError(f"run must be a Run of anneal, got {type(run).__name__}")
    if not 0 < min_probability < 1:
        raise ValueError(f"min_probability must lie in (0, 1), got {min_probability}")
    layout = run.spec.layout
    if not layout.spike_slab_sites():
        raise ValueError(
            "run must be of a model with a spike-and-slab site, got one of "
            f"{', '.join(repr(site.name) for site in layout.sites[:4])}: is the network made with SparseNet or sparsify?"
        )
    chain = best_chain(run)
    draws = _draws_of_structure(run)
    values = layout.constrained(run.positions[chain])
    masks: dict[str, Tensor] = {}
    for name, probability in _inclusion(run, draws, chain).items():
        masks[name] = probability > min_probability
        values[name] = values[name] * masks[name]
    for module in layout.modules():
        sites = layout.of_module(module)
        fixed = {name for name, site in sites.items() if site.law is None}
        own = {name: masks.get(s.name, torch.ones_like(values[s.name], dtype=torch.bool)) for name, s in sites.items()}
        mine, shape = {name: values[s.name] for name, s in sites.items()}, run.spec.input_shapes[module]
        pruned, own = prune(module.module, mine, own, fixed, shape)
        values.update({sites[name].name: value for name, value in pruned.items()})
        masks.update({sites[name].name: mask for name, mask in own.items() if name not in fixed})
    reads = _reads(run, masks)
    return Structure(
        masks, values, _input_probability(run, draws), reads, run.input_names, run.positions.shape[0], layout
    )


def _inclusion(run: Run, draws: Tensor | StoredDraws, chain: int) -> dict[str, Tensor]:
    """By site, the inclusion probability of each weight averaged over the draws of a chain, which are read one at a time.

    Where draws are sparse it was averaged as they came.
    """
    if run.schedule.last_phase == "sample" and run.is_sparse:
        averages = run.trace["posterior_inclusion"].to_dataset()
        return {str(name): torch.as_tensor(values.values[chain]).to(run.positions) for name, values in averages.items()}
    total: dict[str, Tensor] = {}
    for block in each_block(draws, chain):
        for site, part in run.spec.layout.parts(block):
            if site.law is not None:
                probability = site.law.inclusion_probability(part).sum(0) / draws.shape[1]
                total[site.name] = total[site.name] + probability if site.name in total else probability
    return total


def _draws_of_structure(run: Run) -> Tensor | StoredDraws:
    """(chain, draw, coordinate): the draws of a sampling phase, the last position of a cooled run."""
    return run.draws if run.schedule.last_phase == "sample" else run.positions[:, None]


def best_chain(run: Run) -> int:
    """The one with the lowest mean loss over its last draws."""
    loss = run.trace["sample_stats"].to_dataset()["loss"].values
    tail = max(1, loss.shape[1] // 2)
    return int(loss[:, -tail:].mean(1).argmin())


def _input_probability(run: Run, draws: Tensor | StoredDraws) -> Tensor:
    """(num_inputs,) share of all draws in which a live path leaves an input."""
    chains = range(draws.shape[0])
    return (
        torch.cat([inputs_read(run, block) for chain in chains for block in each_block(draws, chain)]).float().mean(0)
    )


def inputs_read(run: Run, draws: Tensor) -> Tensor:
    """(..., num_inputs) whether a live path of each draw (..., coordinate) leaves an input; empty where it is not known."""
    masks = {s.name: s.law.inclusion_probability(p) > 0.5 for s, p in run.spec.layout.parts(draws) if s.law}
    found = _reads(run, masks)
    return found if len(found) else torch.zeros(*draws.shape[:-1], 0, dtype=torch.bool)


def _reads(run: Run, masks: dict[str, Tensor]) -> Tensor:
    """Inputs that a network reads by a live path, or a sparse coefficient vector over the inputs includes.

    Masks are (..., *shape). Empty where the model has neither, so that it is not known which inputs act.
    """
    layout, num_inputs = run.spec.layout, run.num_inputs or 0
    found = []
    for module in run.spec.readers if num_inputs else ():
        sites = layout.of_module(module)
        device = next(module.module.parameters()).device
        every = {n: masks.get(s.name, torch.ones(s.shape, dtype=torch.bool, device=device)) for n, s in sites.items()}
        found.append(live_inputs(module.module, every, num_inputs).cpu())
    vectors = [s.name for s in layout.spike_slab_sites() if s.module is None and s.shape == (num_inputs,)]
    found += [masks[name].cpu() for name in vectors]
    return (
        torch.stack(torch.broadcast_tensors(*found)).any(0)
        if found and num_inputs
        else torch.zeros(0, dtype=torch.bool)
    )
