"""``with_bagua`` under the path of the original: ``compat.module``."""

from bagua.torch_api.compat.module import BaguaModule, install, with_bagua

__all__ = ["BaguaModule", "install", "with_bagua"]
