"""Hosts and ranks as processes of their own, and the right results of every operation that they run.

``world`` starts and commands them, ``rank`` and rig/engine_main.py are their programs, ``cases`` lists what to run,
``reference`` says what must come out and how far from it a result may lie. Used by the tests beside it and by
tests/soak.
"""
