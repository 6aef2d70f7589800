"""Control of jobs from Python: submit, look, watch, read logs, cancel. What the ``bagua`` command line is made of.

    with Client() as client:
        job = client.submit(script="train.py", nnodes=2, nproc_per_node=2, working_dir=".")
        for update in client.watch(job.job_id):
            ...

Everything is synchronous; a Client may be used from several threads. Messages are those of ``bagua.proto``.
"""

from bagua.base.job_options import JobOptions
from bagua.client.client import Client
from bagua.client.packing import Packed, pack
from bagua.client.reach import Reach, find_reach
from bagua.client.specification import job_spec

JobArguments = JobOptions
"""Its name in earlier versions."""

__all__ = ["Client", "JobArguments", "JobOptions", "Packed", "Reach", "find_reach", "job_spec", "pack"]
