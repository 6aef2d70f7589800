"""The Kubernetes operator: BaguaJobs become a coordinator, node daemons as pods, and a job that the coordinator runs.

``reconcile`` decides (pure: what was seen and a clock in; actions and the new status out), ``objects`` and ``pods`` say
how Kubernetes objects look, ``adapter`` listens by kopf, ``cluster`` and ``service`` look and act.
"""
