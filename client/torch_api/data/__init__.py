"""Data of elastic jobs: which samples are whose, and a loader that follows changes of membership."""
