"""From a Pyro model to an interval: anneal, select, refit, predict."""

if __name__ != "pyro_sparse.inference":
    raise ImportError("this folder is the package pyro_sparse.inference: write `from pyro_sparse import inference`")
