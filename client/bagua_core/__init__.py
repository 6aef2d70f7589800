"""Names of the original's native module, for programs that import it: what stands behind each of them here.

The core of this library is ``bagua.csrc``, compiled on first use; ``bagua.torch_api`` is what programs call.
"""

import bagua as _bagua
from bagua import csrc
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.torch_api.bucket import BaguaBucket as BaguaBucketPy
from bagua.torch_api.comm.communicator import Communicator as BaguaSingleCommunicatorPy
from bagua.torch_api.compat.backend import Backend as BaguaCommBackendPy
from bagua.torch_api.compat.operations import AsynchronousOperation as DecentralizedFullPrecisionAsynchronousPy
from bagua.torch_api.compat.operations import DecentralizedOperation as DecentralizedFullPrecisionSynchronousPy
from bagua.torch_api.tensor import BackendTensor as BaguaTensorPy

__version__ = _bagua.__version__

__all__ = [
    "BaguaBucketPy",
    "BaguaCommBackendPy",
    "BaguaSingleCommunicatorPy",
    "BaguaTensorPy",
    "DecentralizedFullPrecisionAsynchronousPy",
    "DecentralizedFullPrecisionSynchronousPy",
    "install_deps",
    "show_version",
]


def install_deps() -> None:
    """Compiles the core, where that has not been done: there is nothing else to install. The original fetched
    libraries here. Raises BuildError with the compiler's words."""
    csrc.load()


def show_version() -> None:
    """Prints the versions of the library, and of what its core says to those of other processes."""
    print(f"bagua {__version__}, core {WIRE_VERSION}")
