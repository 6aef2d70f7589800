"""Codes of the coordinator, credentials and jobs."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "service",
    "The coordinator: calls, credentials, jobs, database",
    "Most of them are answers of the coordinator: the client raises the same text. In Python they are a "
    "`ServiceError`, or a `ConfigError` where a setting of this machine is wrong.",
    (
        Entry(
            "BG801",
            "The coordinator does not answer",
            "No coordinator runs at this address, the network or a firewall does not let the call through, it took "
            "longer than the limit, or the coordinator ended meanwhile.",
            "Check `--coordinator` or `BAGUA_COORDINATOR`. Start one with `bagua coordinator`. Jobs that run go on "
            "while its host refuses connections. Where the host is unreachable, nodes end their ranks after a minute "
            "(`--fence-after`; docs/operations.md#without-coordinators-or-their-database has all cases).",
        ),
        Entry(
            "BG802",
            "The coordinator can't do it at this moment",
            "The coordinator is being stopped; the node is not connected, or to another coordinator; its session has "
            "ended or was replaced by a newer one; or its daemon did not answer in time.",
            "Try again. If it stays, `bagua node list` shows whether the node is connected, and the log of the daemon "
            "there says why not. Ask another coordinator with `--coordinator`.",
        ),
        Entry(
            "BG803",
            "Versions do not know each other's calls",
            "The coordinator is older than the client and does not have the call.",
            "Upgrade the coordinator, or use the client of its version. One minor version of difference is meant "
            "to work (`docs/operations.md`).",
        ),
        Entry(
            "BG804",
            "There is no usable credential",
            "The token file is missing, empty, damaged or can't be made, or the token has expired or was revoked.",
            "Name a token file with `BAGUA_TOKEN_FILE` or `--token-file`. On the coordinator's host it lies in the "
            "state folder; an administrator makes others with `bagua token create`.",
        ),
        Entry(
            "BG805",
            "Your account may not do this",
            "The token is good, and its role, namespace, job or node does not include this call.",
            "`bagua token whoami` shows your account. Ask an administrator for a token with another role or namespace.",
        ),
        Entry(
            "BG806",
            "A secret file is not safe",
            "The file with a token, key or secret can be read by others, belongs to another user, is no regular "
            "file, or is too large to be one.",
            "`chmod 600 FILE` (`defaultMode: 0400` in a volume of Kubernetes). Replace the secret if others may "
            "have read it.",
        ),
        Entry(
            "BG807",
            "Without TLS only loopback is served and called",
            "Anyone who reaches the address could run code there, so Bagua refuses to listen on or call an address "
            "beyond this machine without mutual TLS.",
            "Make certificates with `bagua certs DIR --host HOST`, copy them to the hosts, and pass `--tls DIR` "
            "everywhere (`docs/service.md`).",
        ),
        Entry(
            "BG808",
            "Certificates can't be used",
            "A file of the TLS folder is missing or can't be read, a certificate has expired or is not for this "
            "host, or a rotation's steps were called in another order.",
            "`bagua certs DIR --show` tells what lies there, `--rotate` replaces it in three steps (begin, switch, "
            "finish: `docs/security.md`), and `--renew --host …` at once, in a cluster that is stopped. The files must "
            "belong to the user that runs the service, such as `bagua` under systemd.",
        ),
        Entry(
            "BG809",
            "The OIDC provider can't be used",
            "A setting of `--oidc-…` is missing or has another form, or the provider's own description does not fit.",
            "Give `--oidc-issuer https://…`, `--oidc-audience` and at least one `--oidc-grant CLAIM=VALUE:ROLE`.",
        ),
        Entry(
            "BG810",
            "There is no job, node, token or study of this name",
            "It never existed, was removed after its time (`bagua coordinator --keep`), or belongs to a namespace "
            "that your account can't see.",
            "`bagua job list`, `bagua node list`, `bagua token list` and `bagua tune list` show those there are.",
        ),
        Entry(
            "BG811",
            "A name or id is in use, or means several",
            "The beginning of an id fits several jobs, two daemons have the same node id, or an idempotency key is "
            "being used by another call.",
            "Give more of the id. Give each daemon a state folder or `--node-id` of its own.",
        ),
        Entry(
            "BG812",
            "A job can't be submitted like this",
            "A field of the specification is missing, too large, of another form, or excluded by another field. "
            "The error names the field.",
            "Correct the field. Pass large inputs in files that the nodes can read, not as arguments.",
        ),
        Entry(
            "BG813",
            "The job or node is in a state that does not allow it",
            "The job has ended, is not elastic, is being stopped or has not begun; the node is the last one that "
            "holds the job's state; or a daemon refused to be replaced.",
            "`bagua job show ID` shows the state. Submit with `--elastic` if you want to pause, scale or drain.",
        ),
        Entry(
            "BG814",
            "A limit of the service is reached",
            "The service keeps a limited number of tokens, traces, secrets and bytes of code at the same time, and "
            "answers a limited number of callers without a token.",
            "Try again when other jobs or traces have ended. Revoke tokens that nobody needs (`bagua token revoke`).",
        ),
        Entry(
            "BG815",
            "The code of a job can't be shipped",
            "The working directory has too many or too large files, files that can't be read, links that lead out "
            "of it, or the upload was cut off or damaged.",
            "Put what the job does not need into `.baguaignore`, and data where the nodes can read it. Repeat a "
            "broken upload.",
        ),
        Entry(
            "BG816",
            "The database can't be used",
            "The URL has another form, the database does not answer, its disk is full or read-only, its file is "
            "locked or damaged.",
            "The error names the place and what to do. After full disks and lost connections the coordinator goes "
            "on by itself; a damaged database is restored from a backup (`bagua coordinator restore`).",
        ),
        Entry(
            "BG817",
            "The database is of another version",
            "A newer version of Bagua made its schema.",
            "Start the coordinator with that version, or with another database or state folder.",
        ),
        Entry(
            "BG818",
            "A backup can't be made, checked or restored",
            "The file is missing, exists already, is no backup or is damaged; the database is not empty; or a "
            "coordinator still runs on it.",
            "Stop all coordinators before you restore. Give `--replace` to overwrite, after a backup of what is "
            "there. `bagua coordinator check` looks for damage.",
        ),
        Entry(
            "BG819",
            "Another coordinator or daemon uses the same folder",
            "Each of them needs a state folder alone.",
            "Stop the other process, or give this one another `--state-dir` or `--name`.",
        ),
        Entry(
            "BG820",
            "A request or message can't be understood",
            "A field is out of its limits, a page token or list is none, or bytes are no message of the protocol: "
            "another program, or another version of Bagua, sent them.",
            "In a program of your own correct the field that the error names. Otherwise bring client, coordinator "
            "and daemons to the same release.",
        ),
        Entry(
            "BG821",
            "An account or token can't be made like this",
            "Name, role, namespace, Unix user or lifetime has another form, or they do not go together.",
            "Correct the field that the error names; `docs/security.md` lists roles and what each needs.",
        ),
        Entry(
            "BG822",
            "Settings of the coordinator do not fit",
            "A setting has a value of another form, or times contradict each other: a lease must outlast "
            "heartbeats, and `--fence-after` the lease.",
            "Correct the option or the variable that the error names.",
        ),
        Entry(
            "BG824",
            "The steps of a job can't be traced now",
            "The job does not run, is paused or has ended, too many steps or seconds were asked for, or no step "
            "came in time.",
            "Trace a job that trains. Raise `--timeout` if its steps take long.",
        ),
        Entry(
            "BG825",
            "The coordinator failed",
            "A fault of the coordinator ended the call.",
            "The log of the coordinator has the traceback: please report it, with `bagua support-bundle`.",
        ),
        Entry(
            "BG830",
            "A BaguaJob can't be used",
            "The specification in the Kubernetes object has a field of another form, or fields that exclude each "
            "other.",
            "Correct the field that the error names: `kubectl explain baguajob.spec` shows them, "
            "`docs/kubernetes.md` has examples.",
        ),
        Entry(
            "BG831",
            "The Kubernetes API can't be used",
            "The operator finds no kubeconfig, the API server does not answer, or it refuses the operator's account.",
            "Give `--kubeconfig FILE` outside of a cluster. In a cluster apply the roles that come with the operator.",
        ),
        Entry(
            "BG832",
            "A manifest of the original can't be converted",
            "The file is no manifest of kind Bagua, or its command can't be understood from the file alone.",
            "Write a command with script or module and a number of ranks into the manifest, or write a BaguaJob by "
            "hand.",
        ),
    ),
)
