"""Code that every part needs: folders, addresses, credentials, the tree of exceptions.

A leaf: imports the standard library and grpc, nothing of ours.
"""
