"""Console scripts of the original: ``baguarun``."""
