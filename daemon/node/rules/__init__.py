"""Decisions about a job, without input or output."""
