"""Functions for ranks in the tests of the GPU leg. Every function gets a ``Member`` and returns what JSON can hold."""
