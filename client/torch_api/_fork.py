"""Imported before gRPC is: tells it to leave forks alone.

Training code forks (workers of a DataLoader), and the children never use our connections. gRPC's own preparation for
forks stops its threads at each of them and writes about it to stderr. Set GRPC_ENABLE_FORK_SUPPORT=1 if children of
yours use gRPC.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
