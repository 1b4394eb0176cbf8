"""Call a function on every rank of a run, in the workers of another system such as Dask or Ray."""
