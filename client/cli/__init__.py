"""The ``bagua`` command line. Reaches the service through ``bagua.client`` alone and never imports torch.

Commands import heavy modules (grpc, rich, ours that need them) inside functions, so that ``bagua --help`` is instant.
"""
