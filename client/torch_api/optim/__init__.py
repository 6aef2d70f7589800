"""Optimizers whose parameters share tensors, so that one kernel call does the work of many."""
