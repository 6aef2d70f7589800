"""Hosts and ranks as processes of their own, and what is right for every operation that they run.

``world`` starts and commands them, ``host`` and ``rank`` are their programs, ``cases`` lists what to run, ``reference``
says what must come out and how far from it a result may lie. Used by the tests beside it and by tests/soak.
"""
