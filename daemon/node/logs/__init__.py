"""Output of ranks: written to files, read for users, expired."""
