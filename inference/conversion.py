"""to_arviz: this package's runs, and those of any Pyro MCMC, as what the installed ArviZ reads."""

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pyro
import torch
import xarray as xr
from pyro.distributions import Unit
from pyro.distributions.util import scale_and_mask
from pyro.infer import MCMC
from torch import Tensor
from torch.utils.data import DataLoader

from pyro_sparse.inference.checks import Node
from pyro_sparse.inference.layout import named_dims
from pyro_sparse.inference.minibatch import stream
from pyro_sparse.inference.potential import trace_with
from pyro_sparse.inference.response import BLOCK, Response
from pyro_sparse.inference.run import Run
from pyro_sparse.inference.warning import warn

GROUPS = ("log_likelihood", "posterior_predictive")
RESERVED = ("chain", "draw")

Array = np.ndarray[Any, Any]


def to_arviz(source: Any, groups: Collection[str] = ()) -> Any:
    """What the installed ArviZ reads: a DataTree for ArviZ 1.x, an InferenceData for 0.23.

    Args:
        source: a :class:`Run`, a DataTree such as its ``trace``, or a ``pyro.infer.MCMC`` that was run, with any kernel:
            NUTS, HMC, :class:`SGHMC`. Values are on their supports; axes of weights are named by their layers.
        groups: what else to compute, one pass of the model over its rows a draw: "log_likelihood" of every row, which LOO
            and WAIC read, and "posterior_predictive", a new response to every row; either brings "observed_data" along.
            Observed sites without rows are left out; a masked row has log-likelihood 0.

    Raises:
        TypeError: for any other source.
        ValueError: naming the site or the group that there cannot be.
        ImportError: where ArviZ is not installed.
    """
    import arviz

    tree = to_datatree(source, groups)
    return tree if int(arviz.__version__.split(".")[0]) >= 1 else arviz.InferenceData.from_datatree(tree)


def to_datatree(source: Any, groups: Collection[str] = ()) -> xr.DataTree:
    """The same before ArviZ sees it."""
    groups = [groups] if isinstance(groups, str) else groups
    if any(group not in GROUPS for group in groups):
        raise ValueError(f"groups must hold some of {GROUPS}, got {groups!r}")
    tree = _tree(source)
    if groups:
        tree = tree.assign({name: xr.DataTree(dataset) for name, dataset in _of_rows(source, groups).items()})
    return tree


def _tree(source: Any) -> xr.DataTree:
    """Posterior and statistics."""
    if isinstance(source, xr.DataTree):
        return source
    if isinstance(source, Run):
        return source.trace
    if not isinstance(source, MCMC):
        raise TypeError(
            f"source must be a Run, a DataTree or a pyro.infer.MCMC, which keeps its draws, got {type(source).__name__}"
        )
    samples = _samples(source)
    chains, draws = next(iter(samples.values())).shape[:2]
    index = {"chain": np.arange(chains), "draw": np.arange(draws)}
    dims = named_dims({name: value.shape[2:] for name, value in samples.items()})
    posterior = {name: (("chain", "draw", *dims[name]), value) for name, value in samples.items()}
    attributes = {"inference_library": "pyro", "inference_library_version": pyro.__version__}
    groups = {"posterior": xr.Dataset(posterior, coords=index, attrs=attributes)}
    diverging = _diverging(source, chains, draws)
    if diverging is not None:
        statistics = {"diverging": (("chain", "draw"), diverging)}
        groups["sample_stats"] = xr.Dataset(statistics, coords=index, attrs=attributes)
    return xr.DataTree.from_dict(groups)


def _samples(mcmc: MCMC) -> dict[str, Array]:
    """(chain, draw, ...) of every site, on its support.

    Raises:
        ValueError: naming a site that a dataset cannot hold.
    """
    if mcmc._samples is None:
        raise ValueError("source must hold draws, but this MCMC was not run yet")
    samples = {name: value.detach().cpu().numpy() for name, value in mcmc.get_samples(group_by_chain=True).items()}
    for name in samples:
        if name in RESERVED or "/" in name:
            raise ValueError(f"a site must not be called chain or draw nor have a '/' in its name, got '{name}'")
    if not samples:
        raise ValueError("source must hold draws of a site, got none")
    return samples


def _diverging(mcmc: MCMC, chains: int, draws: int) -> Array | None:
    """(chain, draw) booleans; None of a kernel that does not say."""
    found = [diagnostics.get("divergences") if diagnostics else None for diagnostics in mcmc._diagnostics]
    if any(not isinstance(numbers, list) for numbers in found):
        return None
    diverging = np.zeros((chains, draws), dtype=bool)
    for chain, numbers in enumerate(found):
        diverging[chain, numbers] = True
    return diverging


def _of_rows(source: Any, groups: Collection[str]) -> dict[str, xr.Dataset]:
    """The groups that need the model, draw by draw."""
    values, nodes_at, seed, (chains, draws) = _evaluator(source)
    results: dict[str, dict[str, Array]] = {name: {} for name in ("observed_data", *groups)}
    for chain in range(chains):
        for draw in range(draws):
            with torch.no_grad(), torch.random.fork_rng(_cards(source)):
                torch.manual_seed((stream(seed, chain, "predictive") + draw) % 2**32)
                found = _rows(nodes_at(values(chain, draw)), groups)
            for (group, site), array in found.items():
                if group == "observed_data":
                    results[group].setdefault(site, array)
                    continue
                home = results[group]
                if site not in home:
                    home[site] = np.empty((chains, draws, *array.shape), dtype=array.dtype)
                home[site][chain, draw] = array
    leading = {"chain": np.arange(chains), "draw": np.arange(draws)}
    return {
        group: _dataset(sites, {} if group == "observed_data" else leading) for group, sites in results.items() if sites
    }


def _dataset(sites: Mapping[str, Array], leading: Mapping[str, Array]) -> xr.Dataset:
    variables, coords = {}, dict(leading)
    for name, array in sites.items():
        shape = array.shape[len(leading) :]
        dims = [f"{name}_dim_{axis}" for axis in range(len(shape))]
        variables[name] = ((*leading, *dims), array)
        coords |= {dim: np.arange(size) for dim, size in zip(dims, shape, strict=True)}
    return xr.Dataset(variables, coords=coords)


Blocks = Iterator[dict[str, Node]]  # the observed sites, block after block of rows


def _evaluator(source: Any) -> tuple[Any, Any, int, tuple[int, int]]:
    """Values of a draw, observed sites at values, seed, and numbers of chains and draws."""
    if isinstance(source, Run):
        run = source
        if run.is_sparse:
            warn("draws are sparse: the groups are of networks without the weights that a draw does not include")
        if run.spec.loader is not None:
            raise ValueError("groups need all rows in memory, but this run took them from a DataLoader")
        size = run.draws.shape[0], run.draws.shape[1]
        return (
            lambda chain, draw: run.spec.layout.constrained(run.draws[chain, draw]),
            functools.partial(_blocks_of_run, run),
            run.seed,
            size,
        )
    if isinstance(source, MCMC):
        samples = source.get_samples(group_by_chain=True)
        chains, draws = next(iter(samples.values())).shape[:2]
        return (
            lambda chain, draw: {name: value[chain, draw] for name, value in samples.items()},
            functools.partial(_block_of_mcmc, source),
            0,
            (chains, draws),
        )
    raise TypeError(
        f"source must be a Run or an MCMC for groups, since a trace knows no model, got {type(source).__name__}"
    )


def _blocks_of_run(run: Run, values: dict[str, Tensor]) -> Blocks:
    spec = run.spec
    size = BLOCK if spec.data else spec.num_data
    responses = {site: Response(spec, site) for site in spec.responses}
    some = next(iter(responses.values()))
    seen = 0
    for indices in some.blocks(spec.num_data, size):
        nodes = {site: one.node(values, one._block(spec.data, indices), indices) for site, one in responses.items()}
        of_rows = {
            s: any(f.name in spec.plates for f in node["cond_indep_stack"]) or not spec.plates
            for s, node in nodes.items()
        }
        rows = len(indices) - max(0, seen + len(indices) - spec.num_data)
        # A site beside the rows is the same in every block.
        yield {s: node | {"rows": rows if of_rows[s] else None} for s, node in nodes.items() if of_rows[s] or not seen}
        seen += len(indices)


def _block_of_mcmc(mcmc: MCMC, values: dict[str, Tensor]) -> Blocks:
    if any(isinstance(argument, DataLoader) for argument in mcmc._args or ()):
        raise ValueError("groups need all rows in memory, but this MCMC took them from a DataLoader")
    model = getattr(mcmc.kernel, "model", None)
    if model is None:
        raise ValueError("groups need the model, but the kernel of this MCMC was given a potential")
    given = functools.partial(model, **(mcmc._kwargs or {}))
    nodes = trace_with(given, values, None, frozenset(), tuple(mcmc._args or ()))
    latent = [name for name, node in nodes.items() if not node["is_observed"] and name not in values]
    if latent:
        raise ValueError(f"groups need a draw of every latent site, but '{latent[0]}' has none: was it marginalised?")
    yield {
        name: node for name, node in nodes.items() if node["is_observed"] and not node["infer"].get("_deterministic")
    }


def _rows(blocks: Blocks, groups: Collection[str]) -> dict[tuple[str, str], Array]:
    """What each group holds of each observed site at one draw."""
    parts: dict[tuple[str, str], list[Tensor]] = {}
    left_out: list[str] = []
    for nodes in blocks:
        for site, node in nodes.items():
            law, value, rows = node["fn"], node["value"], node.get("rows")
            frames = [frame for frame in node["cond_indep_stack"] if frame.full_size not in (None, frame.size)]
            if rows is None and frames:
                raise ValueError(f"groups need all rows at once at every observed site, got '{site}'")
            if not law.batch_shape:  # no rows, as of a scalar factor
                left_out.append(site)
                continue
            own = {"observed_data": value}
            if "log_likelihood" in groups:
                own["log_likelihood"] = scale_and_mask(law.log_prob(value), 1.0, node["mask"])
            if "posterior_predictive" in groups:
                own["posterior_predictive"] = law.sample()
            if isinstance(law, Unit):  # of pyro.factor, which has a density and no response
                own = {"log_likelihood": own["log_likelihood"]} if "log_likelihood" in own else {}
            for group, tensor in own.items():
                parts.setdefault((group, site), []).append(tensor[:rows])
    if not parts:
        raise ValueError(
            f"groups need an observed site whose rows are independent, in a plate, got {sorted(set(left_out))}"
        )
    return {key: torch.cat(tensors).cpu().numpy() for key, tensors in parts.items()}


def _cards(source: Any) -> list[int]:
    """The CUDA devices whose generators a model may use."""
    data = source.spec.data if isinstance(source, Run) else source._args
    return sorted({item.device.index or 0 for item in data if isinstance(item, Tensor) and item.is_cuda})
