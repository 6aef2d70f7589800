"""The name by which ``torch.distributed`` knows the backend. Nothing is imported here: see ``registration.py``."""

NAME = "bagua"
