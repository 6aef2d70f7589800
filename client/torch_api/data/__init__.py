"""Which samples are whose: balanced loads, elastic jobs, and a loader that follows changes of membership."""
