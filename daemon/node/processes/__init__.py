"""Processes of this machine: seen in /proc, watched, and ended."""
