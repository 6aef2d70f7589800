"""Limits of waits. Tests run beside others on slow machines, so a limit tells a hang from an answer, and no more."""

SOON_S = 60.0
"""For whatever takes a moment on an idle machine."""
