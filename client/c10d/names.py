"""The name by which ``torch.distributed`` knows the backend: again in ``_bagua_autoload``, which imports nothing."""

NAME = "bagua"
