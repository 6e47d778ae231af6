"""What a sparse Bayesian model is made of: the prior, what tempering means, the layers, models to start from."""

if __name__ != "pyro_sparse.models":
    raise ImportError("this folder is the package pyro_sparse.models: write `from pyro_sparse import models`")
