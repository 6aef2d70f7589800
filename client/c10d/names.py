"""The name by which ``torch.distributed`` knows the backend. ``_bagua_autoload`` has it, too: that package imports
nothing of this one before a group is made, and is imported by nothing that it imports then."""

NAME = "bagua"
