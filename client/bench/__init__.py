"""``bagua bench``: what communication costs, beside its floor and its peers.

Modules here describe networks, reports and plots and never import torch: the command line uses them. ``ranks`` holds
the programs that measure; they run as jobs.
"""
