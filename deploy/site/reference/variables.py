"""Environment variables. Those of options and settings come from the code; the others have their words here."""

from __future__ import annotations

from typing import Any

import man
from reference.command_line import place
from reference.markdown import anchor, escaped, table
from reference.settings import CLASSES, variable

RANKS = {
    "BAGUA_ALGORITHM": "The algorithm of models that are wrapped without one, such as `local_sgd:interval=4`; `--algorithm` sets it.",
    "BAGUA_AUTOTUNE": "1: the job [tunes itself](../autotuning.md); `--autotune` sets it.",
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "Settings that a job tries at most; 60.",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "Seconds for which each setting is measured; 5.",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "Seconds before the first setting is tried; 30.",
    "BAGUA_C10D": "`cpp` or `python`: the implementation of the backend of `torch.distributed`; C++ where it can be built.",
    "BAGUA_CHECKPOINT_DIR": "Folder of checkpoints, for a `Checkpointer` without one; `--checkpoint-dir` sets it.",
    "BAGUA_CHECKPOINT_ON_REQUEST": "1: a `Checkpointer` looks every few seconds whether somebody asked for a checkpoint.",
    "BAGUA_DEFAULT_BUCKET_SIZE": "Bytes of gradients in a bucket; 10 MiB.",
    "BAGUA_DEVICE_KERNELS": "Path of the library of CUDA kernels; built at first use.",
    "BAGUA_DEVICE_CUDART": "Path of CUDA's runtime library; that of torch, or of the system.",
    "BAGUA_DEVICE_DRIVER": "Path of CUDA's driver library; that of the system.",
    "BAGUA_DEVICE_NCCL": "Path of NCCL's library; that which torch has loaded.",
    "BAGUA_DEVICE_ROUTE": "`staged`, `flat` or `hierarchical`: the [way of CUDA tensors](../../csrc/gpu/leg/README.md); chosen by itself.",
    "BAGUA_INSECURE_RENDEZVOUS": "1: several hosts [meet without a secret](../../client/README.md#scripts-that-something-else-starts).",
    "BAGUA_IS_OUTPUT_AUTOTUNE_LOG": "Another number than 0: each setting that is tried is in the log.",
    "BAGUA_JOB_SECRET": "Secret of a job that torchrun, srun or mpirun starts on several hosts; 32 characters or more.",
    "BAGUA_JOB_SECRET_FILE": "A file with that secret, which its owner alone can read.",
    "BAGUA_KEEP_MEMORY": "0: the C library's allocator stays as it is; else freed memory is kept for the next step.",
    "BAGUA_PROFILE_END": "1: the program ends when its profile is written. `bagua advise` sets it.",
    "BAGUA_PROFILE_FILE": "File for a profile of the first steps. `bagua advise` sets it.",
    "BAGUA_PROFILE_STEPS": "Steps of that profile. `bagua advise` sets it.",
    "BAGUA_REDIS_PASSWORD": "Password of a Redis that hosts share as a cache of samples.",
    "BAGUA_TORCH_DISTRIBUTED": "0: `init_process_group` leaves `torch.distributed` alone.",
    "BAGUA_TRACE_STEPS": "Of so many steps one is sent to a receiver of [traces](../observability.md#traces); 1000.",
    "BAGUA_WAIT_TIMEOUT_S": "Seconds after which a rank gives up waiting for others that are alive; 1800, and 0 for ever.",
    "BAGUA_REPORT_METRICS": "Of the original: is read, and has no effect.",
    "BAGUA_SERVICE_PORT": "Of the original: is read, and has no effect.",
    "BAGUA_AUTOTUNE_SERVER_WAIT_TIME": "Of the original: is read, and has no effect.",
}
SET_BY_THE_DAEMON = {
    "BAGUA_DAEMON_SOCKET": "Socket of the rank's daemon. A process that has it joins that daemon's job.",
    "BAGUA_JOB_ID": "Id of the job.",
    "BAGUA_MEETING_DIR": "Folder in which ranks of one host meet.",
}
PROGRAMS = {
    "BAGUA_CACHE_DIR": "Folder of native code that was compiled; `~/.cache/bagua`.",
    "BAGUA_CORE_MARCH": "Processor for which the core is compiled, as `-march`; `native`.",
    "BAGUA_CUDA_ARCHS": "Architectures of GPUs for which kernels are compiled, such as `9.0`; `TORCH_CUDA_ARCH_LIST`, else 8.0, 9.0, 10.0.",
    "BAGUA_DATABASE_URL": "Is never handed to ranks. The coordinator's own is BAGUA_COORDINATOR_DATABASE_URL.",
    "BAGUA_LIBCRYPTO": "Path of OpenSSL's libcrypto; that of the system.",
    "BAGUA_NODE_DOMAIN_NAMES": "Hosts for `baguarun`, as with the original.",
    "BAGUA_RUNTIME_DIR": "Folder of sockets; the state folder, or where its path is too long `$XDG_RUNTIME_DIR/bagua`, else one in `/tmp`.",
    "BAGUA_SHARED_CACHE_DIR": "A second folder of compiled code, which only root can write; daemons set it for ranks of other users.",
    "BAGUA_SRUN": "Program in place of `srun`, with options.",
    "BAGUA_SSH": "Program in place of `ssh`, with options.",
    "BAGUA_SSH_PORT": "Port of ssh on the hosts.",
    "BAGUA_STATE_DIR": "Folder of state: database, token, certificates, logs of ranks; `~/.local/state/bagua`.",
    "BAGUA_TCP_CONGESTION": "`system`: connections between hosts keep the system's congestion control; `auto`.",
    "BAGUA_TOKEN": "Token for the coordinator itself, in place of BAGUA_TOKEN_FILE.",
}
NET = {
    "BAGUA_ENABLE_NET": "1: programs with NCCL use [Bagua-Net](../../csrc/nccl_net/README.md); `--enable-bagua-net` sets it.",
    "BAGUA_NET_CHUNK": "Least bytes that a data socket takes at a time; 128K.",
    "BAGUA_NET_CONNECT_TIMEOUT": "Seconds for a connection to come about; 60.",
    "BAGUA_NET_HELP": "Bytes outstanding on a connection that call a helper; 512K.",
    "BAGUA_NET_INLINE": "Messages up to this size go over the control socket; 32K.",
    "BAGUA_NET_PEER_TIMEOUT": "Seconds without any acknowledgement after which a peer is lost; 30. 0: as long as TCP tries.",
    "BAGUA_NET_STATS": "File for a line of JSON per connection at its end; 1: standard error.",
    "BAGUA_NET_STREAMS": "Data sockets of a connection; 4.",
    "BAGUA_NET_THREADS": "Helper threads of a process; a quarter of the cores of a rank, at most 2.",
}
DEVELOPMENT = {
    "BAGUA_TEST_BASE_IMAGE": "Image on which the test of the container image builds.",
    "BAGUA_TEST_NCCL": "Folders of NCCL's versions for tests; `dev.py test` sets it.",
    "BAGUA_TEST_SLURM": "Words before Slurm's programs in tests, such as `ssh login`.",
    "BAGUA_TEST_POSTGRES_URL": "A PostgreSQL for tests.",
    "BAGUA_SIMULATION_HISTORIES": "Number of histories in `tests/simulation`.",
    "BAGUA_SIMULATION_SEED": "The history that `tests/simulation` plays.",
    "BAGUA_TORCH": "Version of torch for `deploy/dev.py`.",
    "BAGUA_VENV": "Virtual environment of `deploy/dev.py`; `.venv`.",
}
GROUPS = {
    "Ranks": RANKS,
    "Set by the daemon, for ranks": SET_BY_THE_DAEMON,
    "Commands, daemons and builds": PROGRAMS,
    "Bagua-Net": NET,
    "Tests and development": DEVELOPMENT,
}


def of_options() -> dict[str, list[tuple[str, str, str]]]:
    """Variables that options read: (command, option, help) of each."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for name, command in man.commands().items():
        for parameter in command.params:
            for one in _names(parameter.envvar):
                found.setdefault(one, []).append((name, parameter.opts[0], getattr(parameter, "help", "") or ""))
    return found


def _names(given: Any) -> list[str]:
    return [] if not given else [given] if isinstance(given, str) else list(given)


def of_settings() -> dict[str, str]:
    """Variables of settings, with the settings they are of."""
    return {variable(kind, name): title for title, kind in CLASSES.items() for name in kind.model_fields}


def page() -> str:
    """All variables. Words are Markdown."""
    parts = ["# Environment variables\n", "An option on the command line counts more than its variable.\n"]
    for title, words in GROUPS.items():
        rows = [[f"{anchor(name)}`{name}`", text] for name, text in sorted(words.items())]
        parts += [f"## {title}\n", table(("variable", "meaning"), rows)]
    rows = []
    for name, uses in sorted(of_options().items()):
        commands = dict.fromkeys((command, option) for command, option, _ in uses)
        top = {f"[`{one} {option}`]({_page(one)}#{place(one, option)})" for one, option in [*commands][:3]}
        rows.append([f"{anchor(name)}`{name}`", escaped(uses[0][2]), ", ".join(sorted(top))])
    parts += ["## Of options\n", table(("variable", "meaning", "option"), rows)]
    rows = [
        [f"{anchor(name)}`{name}`", f"[{title}](settings.md#{name.lower()})"] for name, title in of_settings().items()
    ]
    return "\n".join([*parts, "## Of settings\n", table(("variable", "settings of"), rows)])


def _page(command: str) -> str:
    return f"command-line/{place(' '.join(command.split()[:2]))}.md"
