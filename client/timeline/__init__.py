"""Traces of jobs: what ranks and hosts did in some training steps, as a value, as a file and as a picture.

The standard library alone.
"""
