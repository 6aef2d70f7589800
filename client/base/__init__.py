"""What every part shares and nothing else: folders, addresses, credentials, the tree of exceptions.

A leaf: imports the standard library and grpc, nothing of ours.
"""
