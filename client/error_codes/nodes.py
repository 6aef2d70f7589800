"""Codes of node daemons, of ranks that start, and of how they meet."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "nodes",
    "Nodes, ranks that start, and how they meet",
    "A job that fails with one of these shows it in `bagua job show ID`, with the node.",
    (
        Entry(
            "BG901",
            "An option of the node daemon can't be used",
            "A name has other characters than letters, digits, `.`, `_` and `-`, or a number is out of its limits.",
            "Correct the option that the error names.",
        ),
        Entry(
            "BG902",
            "The coordinator refuses this daemon",
            "Its version, token, certificate, node id or protocol does not fit. The coordinator's words follow.",
            "Mend what the words say, then start the daemon again. A daemon that was let in before tries again by "
            "itself.",
        ),
        Entry(
            "BG903",
            "The script or program can't be started on a node",
            "The script, program or working directory is not on that node, can't be read or executed by the ranks' "
            "user, or is not in the `PATH` of the daemon.",
            "Put it on every node at the same path, or ship it with `--working-dir`. Remember that the daemon's "
            "environment counts, not that of your shell.",
        ),
        Entry(
            "BG904",
            "The code of a job can't be fetched or unpacked on a node",
            "The coordinator has it no more or sent other bytes, the node's disk is full, or the archive has "
            "something that is not allowed.",
            "Submit the job again. Make room in the daemon's state folder.",
        ),
        Entry(
            "BG905",
            "Secrets of a job can't be had on a node",
            "The file of `--secret-env` is missing on that node, is open to other users there, or is no text in "
            "UTF-8; or the coordinator was started again, and it has the secrets of `--secret` in memory alone.",
            "Put the file on every node with mode 0600, or submit the job again.",
        ),
        Entry(
            "BG906",
            "Ranks can't run as another user",
            "`bagua daemon --run-as submitter` needs root, an account with a Unix user that exists on the node and "
            "is not root, and a folder that root owns and others can pass through.",
            "Follow `docs/security.md`, or leave `--run-as` out: then ranks run as the daemon's user.",
        ),
        Entry(
            "BG907",
            "The node daemon can't use what the coordinator sent",
            "The description of the job has something that this daemon can't carry out. It comes with versions "
            "that do not fit, and with environments or numbers of ranks beyond the limits.",
            "Bring coordinator and daemons to the same release. If they are, report it with `bagua support-bundle`.",
        ),
        Entry(
            "BG908",
            "The ranks' numbers do not fit together",
            "`RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, or the launcher's own "
            "variables, are missing or contradict each other, or hosts have different numbers of ranks.",
            "Start scripts with `bagua run` or torchrun, or set all five in every process. Under Slurm: `srun "
            "--ntasks-per-node=N --distribution=block`.",
        ),
        Entry(
            "BG909",
            "The ranks did not meet",
            "Not all ranks came to the rendezvous at `MASTER_ADDR:MASTER_PORT` in time, one of them failed before, "
            "or something else writes into the store.",
            "Look at the output of the rank that the error names. All ranks must run the same release and reach "
            "that address.",
        ),
        Entry(
            "BG910",
            "A service that was to be started is not there",
            "The coordinator, daemon or dashboard that `bagua run` or a rank starts ended, did not become ready in "
            "time, or the process that started this one is gone.",
            "The error ends with its last words. `bagua run --keep-state` keeps its log. An overloaded machine "
            "needs fewer ranks.",
        ),
        Entry(
            "BG911",
            "A job of several hosts needs a good secret",
            "Hosts that meet through torch's rendezvous can't know each other, so they need a secret that all of "
            "them hold. It is missing, can't be read, is too short, or was given twice.",
            "`openssl rand -hex 32 > FILE`, mode 0600, the same on all hosts, and `BAGUA_JOB_SECRET_FILE=FILE`. "
            "`client/README.md` lists the other ways.",
        ),
        Entry(
            "BG912",
            "A host is not admitted to the job",
            "Its message does not prove that it has the job's secret, its certificate request is damaged, or the "
            "job does not expect it.",
            "Check that all hosts have the same secret and release. If they have, somebody else writes to the "
            "store: look who can reach `MASTER_ADDR`.",
        ),
        Entry(
            "BG913",
            "`MASTER_ADDR` is no address of the first host",
            "The other hosts call the first one by this address. It has no meaning there, belongs to another "
            "machine, or is a loopback address that means another host elsewhere.",
            "Set `MASTER_ADDR` on all hosts to a name or address by which the others reach the first one.",
        ),
        Entry(
            "BG914",
            "The socket of the node daemon can't be trusted, or is gone",
            "The rendezvous store named a socket that is not there, or that does not lie in a folder of yours alone.",
            "If the daemon has just ended, start the job again. Otherwise somebody else writes to the store at "
            "`MASTER_ADDR:MASTER_PORT`: use a port and network of your own.",
        ),
        Entry(
            "BG915",
            "Not all hosts came",
            "Node daemons on the other hosts did not connect in time: ssh failed, Bagua is not installed there, or "
            "they can't reach this machine.",
            "Read the output of the hosts above. `--address` names another address of this machine; test with `ssh "
            "HOST bagua --version`.",
        ),
        Entry(
            "BG916",
            "The allocation of Slurm does not fit",
            "The command runs outside of an allocation or several times in one, the number of nodes or ranks is "
            "missing or larger than that of the allocation, the other nodes can't use the first one's address, or "
            "the job can't be requeued.",
            "Call `bagua slurm run` once, in a batch script or by `salloc`, without `srun` (`docs/slurm.md`). "
            "`--address` names an address of the first node.",
        ),
        Entry(
            "BG918",
            "The coordinator did not answer a daemon's question",
            "The daemon asked for the code or secrets of a job, and the coordinator was away or busy.",
            "Submit the job again when `bagua node list` shows the node as connected.",
        ),
        Entry(
            "BG919",
            "No address by which other hosts reach this one",
            "`--data-host` is no address of this machine or means every address, or this host has no route to the "
            "peer.",
            "Give an address of this machine in the network of the other hosts: `bagua daemon --data-host ADDRESS`.",
        ),
        Entry(
            "BG920",
            "The node daemon does not let this rank join",
            "The daemon does not hold the job or this rank, the rank has joined before, or the job's engine was "
            "not ready in time.",
            "A process that a daemon started joins once: call `init_process_group()` once, and don't start copies "
            "of a rank with its environment. `bagua job show ID` says what the job waits for.",
        ),
        Entry(
            "BG921",
            "The node daemon does not answer its ranks",
            "The daemon at the socket that `BAGUA_DAEMON_SOCKET` names has ended, or is too busy to answer.",
            "Look at the daemon's log and start it again. Unset the variable if you started the script yourself: "
            "then a daemon is started for the job.",
        ),
        Entry(
            "BG922",
            "A debugger has no terminal in a rank",
            "Ranks of `bagua run` and of daemons have an empty standard input, so `breakpoint()` has nobody to ask.",
            "Start the script by `python SCRIPT`: it is a job of one rank then, with your terminal. For one of several "
            "ranks take a debugger that listens, such as `debugpy`.",
        ),
        Entry(
            "BG923",
            "The machine can't reach itself",
            "Nobody answers at 127.0.0.1, where the services and ranks of one machine meet: its loopback interface is "
            "down, as in a network namespace that nobody has set up, or a firewall is in the way.",
            "`ip link set lo up` as root in that namespace or container. `ip addr show lo` must say UP.",
        ),
    ),
)
