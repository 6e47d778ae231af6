"""Whether a prior meets the rates of lemma 2.1 of the paper: printed, and written to benchmarks/results/lemma.md.

    python benchmarks/lemma.py

The lemma asks for lambda = O(1 / (K [n^H L p]^tau)) for some tau > 0, and for a spike scale at most of the order of
1 / (sqrt(n) K (n^1.5 sigma_1 / H)^H), with K weights, H hidden layers, the widest of L units, p inputs and n rows.
"""

import itertools
import math

import torch
from common import RESULTS

import pyro_sparse as ps


def asked(sizes: list[int], num_data: int, slab_scale: float) -> tuple[float, float]:
    """1 / K, the limit of lambda's rate for small tau, and the spike scale's rate."""
    num_weights = sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(sizes))
    depth = len(sizes) - 2
    log_spike = 0.5 * math.log(num_data) + math.log(num_weights)
    log_spike += depth * math.log(num_data**1.5 * slab_scale / depth)
    return 1 / num_weights, math.exp(-log_spike)


def main() -> None:
    lines = [
        "| network | rows | prior | lambda | 1 / K | spike scale | the lemma's rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for sizes, num_data in (([10, 20, 10, 1], 442), ([100, 20, 10, 1], 10_000), ([2_000, 20, 10, 1], 10_000)):
        torch.manual_seed(0)
        laws = ps.default_prior(ps.SparseNet(sizes).module, num_data)
        for prior, pairs, slab in (
            ("default", [(float(law.slab_prob), float(law.spike_scale)) for law in laws.values()], 1.0),
            ("the paper's", [(1e-7, 1e-6**0.5)], 0.1),
        ):
            prob, spike = asked(sizes, num_data, slab)
            probs, spikes = zip(*pairs, strict=True)
            lines.append(
                f"| {'-'.join(map(str, sizes))} | {num_data:,} | {prior} | {min(probs):.1e} to {max(probs):.1e} | {prob:.1e} | "
                f"{min(spikes):.1e} to {max(spikes):.1e} | {spike:.1e} |"
            )
    text = "\n".join(lines)
    (RESULTS / "lemma.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
