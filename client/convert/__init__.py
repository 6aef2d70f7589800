"""Changes scripts for torch's DistributedDataParallel: ``convert``, behind ``bagua convert``. It reads syntax trees
and runs nothing."""

from bagua.convert.advice import Note
from bagua.convert.script import Converted, convert

__all__ = ["Converted", "Note", "convert"]
