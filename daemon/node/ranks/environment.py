"""Chooses the variables of the daemon's own environment that ranks get: the usual ones below, and those that its
operator names with --pass-env. The others may hold the operator's secrets, which are none of a job's business.

This protects from spreading, not from attack: ranks run as the daemon's user.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from bagua.base.errors import ConfigError
from bagua.base.secrets import looks_secret

# Patterns of names, as in a shell. A variable that looks like a secret (WANDB_API_KEY, a proxy with a password) is not
# among them, whatever its beginning.
USUAL = (
    # the user and the machine
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR"),
    *("TMPDIR", "TMP", "TEMP", "XDG_*"),
    # the interpreter, its packages, and compilers that it calls
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "MAX_JOBS", "MALLOC_*", "GLIBC_TUNABLES"),
    *("ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"),
    # the training stack
    *("TORCH*", "PYTORCH_*", "TRITON_*", "BAGUA_*", "HF_*", "TRANSFORMERS_*", "TOKENIZERS_PARALLELISM"),
    *("CUDA_*", "CUDNN_*", "CUBLAS_*", "NVIDIA_*", "NCCL_*", "HIP_*", "ROCR_*", "GLOO_*", "UCX_*", "FI_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "NUMBA_*", "SLURM_*"),
    # the way out
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"),
)

ALL = "*"  # Passes on everything but the credentials of this service: for a daemon whose operator is the jobs' user

_OWN_SECRETS = ("BAGUA_TOKEN", "BAGUA_JOB_SECRET", "BAGUA_DATABASE_URL", "BAGUA_COORDINATOR_DATABASE_URL")
_PATTERN = re.compile(r"[A-Za-z0-9_*?]+")


def parse_patterns(given: Sequence[str]) -> tuple[str, ...]:
    """``["A,B_*", "C"]`` -> ``("A", "B_*", "C")``. Raises ConfigError for what can't be a name."""
    found = tuple(part.strip() for text in given for part in text.split(",") if part.strip())
    for pattern in found:
        if not _PATTERN.fullmatch(pattern):
            raise ConfigError(f"--pass-env {pattern!r}: write names of variables, or patterns like AWS_*. [BG107]")
    return found


def passed_on(environment: Mapping[str, str], patterns: Sequence[str] = ()) -> dict[str, str]:
    """The part of the daemon's ``environment`` that ranks get: the usual variables, and those that ``patterns`` name.
    The credentials of the service stay here even if a pattern covers them, unless it names them in full."""

    def passes(name: str, value: str) -> bool:
        if name in _OWN_SECRETS:
            return name in patterns
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return True
        return any(fnmatchcase(name, pattern) for pattern in USUAL) and not looks_secret(name, value)

    return {name: value for name, value in environment.items() if passes(name, value)}
