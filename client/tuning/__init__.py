"""The model of a training step: recorded profiles, networks, predictions, and the best cut into buckets.

Standard library alone, so that ranks, the coordinator and the command line import it.
"""
