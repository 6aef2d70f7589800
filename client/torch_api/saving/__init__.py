"""Checkpoints of models, optimizers and jobs in files."""
