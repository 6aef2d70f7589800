"""In a rank: CPU tensors count as tensors of a device, over the fake CUDA runtime (tests/native/leg).

The place of torch.cuda is taken by an object that knows the fake's streams. What torch does is over when it returns, so
that its "current stream" of a device is empty whenever an operation is submitted; and after ``wait`` the host must wait
where a real stream would, or torch would compute too early. That waiting is done here, outside of the library, and is
not among the synchronisations that the fake counts.
"""

import contextlib
import ctypes
import functools
import os
import threading
import time

from bagua.torch_api import communication
from bagua.torch_api.comm import admission, coalesced, state_copy
from bagua.torch_api.comm.commit import flags, retry
from bagua.torch_api.cuda import connection, port
from bagua.torch_api.train import agreement, optimizer_state
from bagua.torch_api.train.bucket_layout import ModelBuckets
from bagua.torch_api.train.model import DistributedModel


class FakeRuntime:
    """The fake CUDA runtime, called directly."""

    def __init__(self):
        self._library = ctypes.CDLL(os.environ.get("FAKE_CUDA") or os.environ["BAGUA_DEVICE_CUDART"])
        self._streams = threading.local()
        self._library.fake_cuda_host_synchronisations.restype = ctypes.c_uint64
        self._library.fake_cuda_misuses.restype = ctypes.c_uint64
        self._library.fake_cuda_first_misuse.restype = ctypes.c_char_p

    def stream(self):
        """The "current stream" of this thread."""
        if not hasattr(self._streams, "handle"):
            handle = ctypes.c_void_p()
            assert self._library.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
            self._streams.handle = handle.value
        found = self._streams.handle
        return found

    def drain(self):
        """Returns when the current stream has done what it holds."""
        self._library.fake_cuda_drain(ctypes.c_void_p(self.stream()))

    def synchronize(self):
        """Waits on the host for the current stream, as the library does it: this is counted."""
        assert self._library.cudaStreamSynchronize(ctypes.c_void_p(self.stream())) == 0

    def watch_this_thread(self):
        """From now on it is counted how often this thread waits for the device."""
        self._library.fake_cuda_watch_this_thread()

    def synchronisations(self):
        """How often it has."""
        found = self._library.fake_cuda_host_synchronisations()
        return found

    def misuse(self):
        """The calls that CUDA does not allow; empty if there were none."""
        return f"{self._library.fake_cuda_first_misuse()!r}" if self._library.fake_cuda_misuses() else ""


class _HostMoment:
    def __init__(self, runtime):
        self._runtime = runtime
        self._now = time.monotonic_ns()

    def passed(self):
        return True

    def await_on_host(self):
        self._runtime.synchronize()

    def nanoseconds(self):
        return self._now


class _HostClock:
    def __init__(self, runtime):
        self._runtime = runtime

    def now(self):
        return _HostMoment(self._runtime)


class FakeCuda(port.Cuda):
    """See ``bagua.torch_api.cuda.port.Cuda``. Tensors with which the library itself tells the ranks something are
    the host's, as they are with a real device."""

    def __init__(self, runtime):
        self._runtime = runtime
        self._host = threading.local()

    def holds(self, tensor):
        return not getattr(self._host, "depth", 0)

    def index(self, device):
        return 0

    def stream(self, index):
        return self._runtime.stream()

    def clock(self, index):
        return _HostClock(self._runtime)

    @contextlib.contextmanager
    def by_way_of(self, stream):
        yield

    def of_the_host(self, function):
        """``function``, in which tensors are the host's."""

        @functools.wraps(function)
        def call(*arguments, **options):
            self._host.depth = getattr(self._host, "depth", 0) + 1
            try:
                return function(*arguments, **options)
            finally:
                self._host.depth -= 1

        return call


RUNTIME = None

HOST_ONLY = (
    (agreement, "_gather_bytes"),
    (optimizer_state, "broadcast_json"),
    (ModelBuckets, "_of_rank_0"),
    (ModelBuckets, "compare_starts"),
    (ModelBuckets, "level_out"),
    (DistributedModel, "_reduce_loss"),
    (retry, "call_the_roll"),
    (flags.Flags, "exchange"),
    (admission, "gather_rows"),
    (admission, "gather_texts"),
    (state_copy, "gather_rows"),
    (state_copy, "largest"),
    (coalesced, "broadcast_object"),
    (communication, "broadcast_object"),
)


def install():
    """Before ``init_process_group``."""
    global RUNTIME
    RUNTIME = runtime = FakeRuntime()
    cuda = FakeCuda(runtime)
    port.PORT.cuda = cuda
    for owner, name in HOST_ONLY:
        setattr(owner, name, cuda.of_the_host(getattr(owner, name)))
    wait = connection.CudaConnection.wait

    def wait_and_drain(self, *arguments):
        times = wait(self, *arguments)
        runtime.drain()
        return times

    connection.CudaConnection.wait = wait_and_drain
    transcode = connection.CudaConnection._transcode

    def transcode_and_drain(self, *arguments, **what):
        transcode(self, *arguments, **what)
        runtime.drain()

    connection.CudaConnection._transcode = transcode_and_drain
