"""Codes of tensors, collective calls and groups."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "tensors",
    "Tensors, collective calls and groups",
    "They come on the rank that made the call, before anything is sent. Other ranks may wait for it meanwhile.",
    (
        Entry(
            "BG401",
            "A tensor of this kind can't be communicated",
            "The argument is no tensor, or it is sparse, complex, of an unsupported dtype, or on a device that is "
            "neither the CPU nor a CUDA device.",
            "Convert it as the error says: `.to_dense()`, `torch.view_as_real(…)`, `.to(dtype)`, `.cpu()`.",
        ),
        Entry(
            "BG402",
            "Tensors of one call do not agree",
            "Send and receive tensor, or the tensors of a list, differ in dtype, device or number of elements, or "
            "the ranks passed rows of different dtypes.",
            "Make them agree on every rank. A gather needs one tensor for each rank; the tensor of all ranks has "
            "as many times the elements of one rank's as there are ranks.",
        ),
        Entry(
            "BG403",
            "Sizes or counts do not fit the number of ranks",
            "The elements or rows can't be shared equally by the ranks, or counts, displacements and blocks do not "
            "lie in the tensor, overlap, or are negative.",
            "Pad the tensor to a multiple of the number of ranks, or use the call with counts (`…_v`, "
            "`send_counts`). Counts are one whole number for each rank.",
        ),
        Entry(
            "BG404",
            "This is no rank to send to or receive from",
            "Root, source or destination is not a rank of the group, or is the calling rank itself.",
            "Ranks of a group count from 0 to its size less 1. A rank can't send to itself: copy instead.",
        ),
        Entry(
            "BG405",
            "The reduction can't be used with these tensors",
            "The reduction is unknown, needs integers (bit operations), has no meaning for bool or complex "
            "tensors, has no gradient, or does not go with a codec.",
            "Choose one that the error lists. With a codec use SUM or AVG of float32; for gradients one that the "
            "error lists.",
        ),
        Entry(
            "BG406",
            "This is no group of which this rank is a member",
            "Ranks of a new group are named twice, do not exist, or do not contain the rank that calls; or the "
            "argument is no group or communicator of Bagua.",
            "All members call `new_group` with the same different ranks. Others do not use the group.",
        ),
        Entry(
            "BG407",
            "Bagua is not initialised in this process, or no more",
            "A call came before `init_process_group()`, after `destroy_process_group()`, for the second time, with "
            "a group of an earlier initialisation, or in a process that was forked from a rank.",
            "Call `bagua.init_process_group()` once in each rank, before other calls, and make groups after it. "
            "Workers that a rank forks (data loaders) can't communicate.",
        ),
        Entry(
            "BG408",
            "An object can't be sent to other ranks",
            "The object can't be pickled, is of a type that is not sent, or is too large as a pickle.",
            "Send plain values; send tensors by the calls for tensors.",
        ),
        Entry(
            "BG410",
            "A group of backend bagua can't be made or used in this way",
            "`torch.distributed` was initialised in another way than the launcher started the ranks, with another "
            "backend below, or the call passes several tensors where the backend takes one.",
            'Call `init_process_group("bagua")` and leave rank and world size to the environment. Import '
            "`bagua.accelerate` before Accelerate makes its state. `docs/torch-distributed.md` lists what is "
            "refused.",
        ),
        Entry(
            "BG411",
            "A registered tensor or bucket of the original's interface is misused",
            "The tensor is not registered, is gone, or has changed since its bucket was made; or the bucket is at "
            "work or belongs to no model.",
            "Register with `ensure_bagua_tensor(name, module_name)`, keep a reference to the tensor, and call "
            "`wait_pending_comm_ops()` before you change a bucket. After a change of tensors make the bucket anew.",
        ),
        Entry(
            "BG412",
            "This function of the original, or of torch, is not there",
            "The name exists so that imports work, and the function has no counterpart here.",
            "Use the replacement that the error names. `docs/from-bagua.md` lists all such names.",
        ),
    ),
)
