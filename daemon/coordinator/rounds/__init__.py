"""The reconciler, and the state in memory that its rounds change."""
