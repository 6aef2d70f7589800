"""What ranks of the engine's tests do; see worker.py."""
