"""Programs that the ranks of a benchmark run: ``python -m bagua.bench.ranks.<name> CONFIG RESULT``.

CONFIG is a JSON document. Rank 0 writes the results, a JSON document too, to the file RESULT (``-``: as one line of
standard output that begins with ``RESULT_MARK``, for jobs on other machines).
"""
