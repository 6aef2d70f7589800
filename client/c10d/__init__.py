"""A backend of ``torch.distributed``: after ``import bagua.c10d``, ``init_process_group("bagua")`` takes it.

Tensors travel as those of ``bagua.torch_api`` do, through the node daemon, which comes up by itself.
"""

from _bagua_autoload import register

register()
