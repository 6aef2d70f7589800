"""Variables of an environment that are secrets, and files that only their owner may read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from bagua.base.errors import ConfigError

HIDDEN = "***"  # stands where the value of a secret is not shown

# A word of a name that ends so makes it a secret: HF_TOKEN, PGPASSWORD.
_SECRET_ENDS = (
    *("TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS", "APIKEY", "ACCESSKEY", "SECRETKEY", "PRIVATEKEY"),
)
_SECRET_WORDS = frozenset({"KEY", "KEYS", "JWT", "PAT", "PWD"})
_FRIENDLY_PAIRS = frozenset(
    {(word, "TOKEN") for word in ("PAD", "EOS", "BOS", "UNK", "MASK", "CLS", "SEP", "MAX", "MIN", "NUM", "PER")}
    | {(word, "KEY") for word in ("PUBLIC", "PRIMARY", "FOREIGN", "SORT", "CACHE", "PARTITION", "HOT")}
    | {("MAX", "KEYS"), ("NUM", "KEYS"), ("PUBLIC", "KEYS")}
)
# A name that ends so tells about a secret and is none: BAGUA_TOKEN_FILE, KEY_SIZE.
_FRIENDLY_LAST = frozenset(
    "FILE PATH DIR FOLDER NAME SIZE LENGTH LEN COUNT LIMIT BITS DIM INDEX TYPE KIND FORMAT ALGORITHM TTL EXPIRY "
    "TIMEOUT VERSION ENABLED PARALLELISM DROPOUT URL URI ENDPOINT HOST PORT HEADER SOCK".split()
)
_FOLDERS = frozenset({"PWD", "OLDPWD"})
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
MAX_FILE_BYTES = 64 << 10


def looks_secret(name: str, value: str = "") -> bool:
    """True if a variable of this name is a secret (HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD), or its value is a URL
    with a password. TOKENIZERS_PARALLELISM, MAX_TOKENS, PAD_TOKEN, SORT_KEY and BAGUA_TOKEN_FILE are none."""
    if _PASSWORD_IN_URL.search(value):
        return True
    # HfToken has two words, as HF_TOKEN has.
    words = [word for word in re.split(r"[^A-Z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()) if word]
    if name.upper() in _FOLDERS or not words or words[-1] in _FRIENDLY_LAST:
        return False
    pairs = zip(["", *words], words, strict=False)
    return any(
        (word in _SECRET_WORDS or word.endswith(_SECRET_ENDS)) and (before, word) not in _FRIENDLY_PAIRS
        for before, word in pairs
    )


def shown(variables: Mapping[str, str]) -> dict[str, str]:
    """The same variables with ``***`` for the value of each secret."""
    return {name: HIDDEN if looks_secret(name, value) else value for name, value in variables.items()}


def read_private(path: Path, title: str, *, personal: bool = False) -> bytes:
    """The content of a file that holds a secret: 64 KiB at most. ``title`` begins the error: "The token file".

    Raises OSError, and ConfigError for a file that others may read or change. The rule is that of PostgreSQL's clients
    for keys: 0600 for a file of one's own; a file of root's may be read by its group, as Kubernetes mounts secrets.
    ``personal`` also refuses a pipe, a file of a third user, who knows the secret, and for root a file that a group
    may read.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())  # the open file is asked: its name may lead elsewhere by now
        if personal:
            _check_personal(path, title, status)
        if not stat.S_ISREG(status.st_mode):
            os.set_blocking(file.fileno(), True)  # a pipe, as in --token-file <(pass show bagua)
        mode = stat.S_IMODE(status.st_mode)
        shared = status.st_uid == 0 and not (personal and os.geteuid() == 0)
        if mode & (0o037 if shared else 0o077):
            raise ConfigError(
                f"{title} {path} is open to other users of this machine (mode {mode:04o}). Close it: `chmod 600 {path}`"
                " (`defaultMode: 0400` in a volume of Kubernetes). If others may have read it already, replace the "
                "secret, too. [BG806]"
            )
        data = file.read(MAX_FILE_BYTES + 1)  # one byte more than it may have
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{title} {path} has more than {MAX_FILE_BYTES} bytes: it can't be the right one. [BG806]")
    return data


def _check_personal(path: Path, title: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{title} {path} must be a file. [BG806]")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{title} {path} belongs to user {status.st_uid}, who could know it. Make your own. [BG806]")
