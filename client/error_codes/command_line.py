"""Codes of options, settings, files and folders."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "command-line",
    "Options, settings, files and folders",
    "Nothing has been started or changed yet when one of these comes.",
    (
        Entry(
            "BG101",
            "An address can't be read",
            "The text is no address of the form that is needed here: host and port, a host for ssh, or a host name.",
            "Write `HOST:PORT`, such as `127.0.0.1:7670`, and brackets around an IPv6 address: `[::1]:7670`. Hosts "
            "that are reached over ssh are `HOST`, `HOST:PORT` or `USER@HOST:PORT`. Name at least one host.",
        ),
        Entry(
            "BG102",
            "The value of an option can't be used",
            "The value has another form than the option takes, or lies outside of its limits. The error names both. "
            "What goes to the service must be UTF-8 text; names of files may be something else on Linux.",
            "Correct the value. `bagua COMMAND --help` shows what each option takes.",
        ),
        Entry(
            "BG103",
            "Options do not go together",
            "Two options exclude each other, or one of them needs another one that is missing.",
            "Leave one of them out, or add the one that the error names. Options can also come from the "
            "environment (`BAGUA_…`) and from a file (`--config`): look there if you did not give them yourself.",
        ),
        Entry(
            "BG104",
            "The script is missing or not there",
            "The command names no script, or a file or folder that does not exist on this machine.",
            "Give the path of the script after all options. A module is run with `-m NAME`, a program that is not "
            "Python with `--no-python`. A folder needs a `__main__.py`.",
        ),
        Entry(
            "BG105",
            "The file of options can't be used",
            "The file of `--config` can't be read, is no TOML, or has a key or value that the command does not take.",
            "Correct the line that the error names. Keys are the command's long options without the hyphens before "
            "them; lists and numbers are written as TOML has them.",
        ),
        Entry(
            "BG106",
            "An environment variable can't be used",
            "A variable that Bagua reads has a value of another form than it needs, such as a word for a number.",
            "Correct or unset the variable that the error names, in every process of the job.",
        ),
        Entry(
            "BG107",
            "A variable for ranks can't be set in this way",
            "`--env`, `--secret-env`, `--secret`, `-x` or `--pass-env` got a text of another form, or the same "
            "name twice.",
            "Write `--env NAME=VALUE`, `--secret-env NAME=FILE`, `--secret NAME=FILE`, `--pass-env NAME,PATTERN*`. "
            "Name each variable once.",
        ),
        Entry(
            "BG108",
            "A folder for state or sockets can't be used",
            "The folder can't be made or written, its disk is full, it belongs to another user, is a link that "
            "somebody else could have made, or its path is too long for a Unix socket (about 100 characters). Or there "
            "is no home to put it in: `HOME` is not set, and the user has no entry in the system's list.",
            "Give a folder of your own with `--state-dir` or `BAGUA_STATE_DIR`; for sockets set `XDG_RUNTIME_DIR`, "
            "or choose a shorter state folder. Make room if the disk is full: services go on by themselves then.",
        ),
        Entry(
            "BG109",
            "A file can't be read or written",
            "A file that an option names is not there, can't be read, is no text, exists already where a new one "
            "is to be made, or lies in a folder that does not exist. Or its disk is full, or that of the file that the "
            "output goes to.",
            "Check path and permissions, and make room. Pictures need a name that ends with `.png`, `.svg` or `.pdf`.",
        ),
        Entry(
            "BG110",
            "Numbers of nodes or ranks make no sense together",
            "The number of nodes does not lie between the least and the most, counts from another number than 0, "
            "or belongs to an elastic job and the job is none.",
            "Check `--nnodes`, `--min-nodes`, `--max-nodes` and `--respawn`. A range (`--nnodes 2:4`) and the two "
            "separate options exclude each other; `--respawn` needs `--elastic`, which the others imply. `bagua "
            "job scale` goes only as far as the limits with which the job was submitted.",
        ),
        Entry(
            "BG111",
            "A port can't be used",
            "Another program listens at this address already, or the address is none of this machine.",
            "Stop the other program (`ss -ltnp` shows it), or choose another port. Port 0 takes any free one.",
        ),
        Entry(
            "BG112",
            "A terminal is needed",
            "The command draws on the terminal and reads keys, and there is none: it was started by cron, by another "
            "program, or with its input or standard error sent elsewhere.",
            "Start it in a terminal; with ssh, `ssh -t HOST bagua top`. For programs and files take the commands that "
            "print once, with `--output json`.",
        ),
    ),
)
