"""Bagua: data-parallel training for PyTorch that hides communication behind computation.

Nothing heavy is imported here, so that ``import bagua`` costs nothing. Training code imports ``bagua.torch_api``, the
command line is ``bagua``, programs that control jobs use ``bagua.client``.
"""

__version__ = "1.0.0.dev0"
