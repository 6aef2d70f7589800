"""Control of jobs from Python: submit, look, watch, read logs, cancel. What the ``bagua`` command line is made of.

    with Client() as client:
        job = client.submit(JobSpec(name="digits", entry="train.py", nnodes=2, nproc_per_node=2))
        for update in client.watch(job.job_id):
            ...

Everything is synchronous; a Client may be used from several threads. Messages are those of ``bagua.proto``.
"""

from bagua.client.client import Client
from bagua.client.reach import Reach, find_reach

__all__ = ["Client", "Reach", "find_reach"]
