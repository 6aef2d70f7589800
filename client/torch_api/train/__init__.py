"""The training step: the wrapped model, buckets and their plans."""
