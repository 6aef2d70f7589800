"""Codes of communication between ranks while a job runs."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "communication",
    "Communication while a job runs",
    "All of these are a `CommunicationError` in Python or a `DistBackendError` under `torch.distributed`, unless "
    "the entry says otherwise. Look first at the rank that failed first: `bagua job show ID` names it.",
    (
        Entry(
            "BG501",
            "The ranks' calls do not match, or a call has wrong arguments",
            "Ranks called different operations, or the same one with other sizes, dtypes or reductions. The error "
            "names two ranks and what each of them passed. Often one rank took another branch: an `if rank == 0`, "
            "an exception that was caught, or a different number of batches. It also comes for a call in a forked "
            "child, and where daemons were started with different settings or versions.",
            "Let all ranks call the same operations in the same order. Use `bagua.join` for uneven numbers of "
            "batches. Start all daemons of a job from the same release with the same options.",
        ),
        Entry(
            "BG502",
            "A rank, a host or the node daemon is lost, or the job was stopped",
            "The other end is gone: its process died, its host or network failed, or the node daemon ended; or the "
            "job was stopped or has failed elsewhere. Ranks that are left get this error; the cause is where the "
            "first one was lost.",
            "`bagua job show ID` and `bagua job explain ID` say who was lost and why, `bagua job logs ID` shows "
            "the output. Elastic jobs (`--elastic`) go on without a lost rank.",
        ),
        Entry(
            "BG503",
            "Somebody did not answer in time",
            "An operation took longer than its limit. The ranks are alive, and at least one of them did not make "
            "the call that the others wait for; the error names whom they wait for. Or a host does not answer any "
            "more.",
            "Look where the named rank is, for example with `py-spy dump --pid`. `BAGUA_WAIT_TIMEOUT_S` (1800 s, "
            "0: never) sets the limit of Bagua's operations, `timeout=` that of `torch.distributed`.",
        ),
        Entry(
            "BG504",
            "Bytes arrived that can't be right",
            "The other end sent something damaged or of another version, or two copies of a state have different "
            "contents. On the way between hosts encryption detects changes.",
            "Check that all hosts run the same release, and that nothing else connects to the ports. If it comes "
            "again, test memory and network of the host that the error names.",
        ),
        Entry(
            "BG505",
            "Memory, descriptors or slots are used up",
            "There is not enough shared memory (`/dev/shm`, or the memory limit of the cgroup), no file descriptor "
            "is left, or too many operations were submitted without being waited for.",
            "The error says which limit it is. In containers give more shared memory (`--shm-size`, or an "
            "`emptyDir` with medium Memory); raise `ulimit -n`; wait for older operations.",
        ),
        Entry(
            "BG506",
            "The operation was stopped",
            "The job was stopped or has failed on another rank, the generation was closed, or the wait was "
            "interrupted.",
            "It is a consequence: `bagua job show ID` names the cause.",
        ),
        Entry(
            "BG507",
            "The native core met something that it did not expect",
            "A call to the operating system failed in an unusual way, or Bagua has a fault.",
            "The error has the system's words. If they point to nothing on the machine, report it with `bagua "
            "support-bundle --job ID`.",
        ),
        Entry(
            "BG508",
            "The members of an elastic job have changed",
            "A `MembershipChanged`: a rank was lost in the middle of something that can't be repeated by itself, "
            "or a group has lost members. The process is a member of the new generation already.",
            "Make new groups among the ranks that are left, and repeat the step on all of them, or leave it out on "
            "all. All-reduce, broadcast and barrier on all ranks are repeated by themselves.",
        ),
        Entry(
            "BG510",
            "CUDA tensors can't be communicated",
            "The GPU leg could not be opened, or an operation on the device failed: a CUDA or NCCL error, or a "
            "device that does not belong to this rank.",
            "The error has the words of CUDA or NCCL. `bagua doctor` checks drivers and devices. Until it is "
            "mended, tensors on the CPU work.",
        ),
        Entry(
            "BG511",
            "Another rank failed",
            "A `BaguaError`: the ranks agree before they go on, and another one has told that it can't. Its words "
            "follow.",
            "Mend what the other rank reports; its own output has the whole traceback.",
        ),
        Entry(
            "BG512",
            "The group or communicator was aborted on this rank",
            "The program called `abort()` here, or a group of `torch.distributed` was destroyed while it was at work.",
            "Make a new group. Members that did not abort wait until this rank leaves the job.",
        ),
    ),
)
