"""Launchers of the original: ``python -m bagua.distributed.launch`` and ``.run``, over ``bagua run`` and torchrun."""
