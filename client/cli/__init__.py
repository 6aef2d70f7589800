"""The ``bagua`` command line. Reaches the service through ``bagua.client`` alone and never imports torch.

What is heavy (grpc, rich) is imported where it is used, so that ``bagua --help`` is instant.
"""
