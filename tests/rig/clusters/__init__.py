"""Kubernetes, Slurm and hosts behind sshd, each on this machine."""
