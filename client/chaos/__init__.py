"""``bagua chaos``: which faults are played, the program that is trained meanwhile, and what must hold.

Nothing here starts a service: ``bagua.cli.chaos`` does.
"""
