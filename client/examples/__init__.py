"""Examples, written as a user would write them: ``bagua run --nproc-per-node 2 -m bagua.examples.digits``."""
