"""Communicators, groups and primitives on tensors."""
