"""Shows what a cluster does, in a browser (``bagua dashboard``) and in a terminal (``bagua top``).

A process of its own beside ``bagua.client``: it asks the coordinator as every other client does, and keeps the past of
what it was told in memory, bounded. Needs starlette and uvicorn, and textual for the terminal:
``pip install "bagua[dashboard]"``.
"""
