"""Samplers and loaders: balanced loads, elastic jobs, and a loader that follows changes of membership."""
