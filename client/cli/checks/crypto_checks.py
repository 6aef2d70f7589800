"""``bagua doctor`` on encryption: which libcrypto connections between hosts will use, and how fast it is."""

from __future__ import annotations

import os

from bagua.cli.checks import machine
from bagua.cli.checks.crypto_probe import Probe, processor_flags
from bagua.cli.checks.machine import FAIL, OK, WARN, Finding

NAME = "encryption"
PROBE = ["-m", "bagua.cli.checks.crypto_probe"]
PROBE_DEADLINE_S = 30.0
# OpenSSL 3.1 brought an AES-GCM that needs all of these.
WIDE_AES = {"vaes", "vpclmulqdq", "avx512f", "avx512dq", "avx512bw", "avx512vl"}
OPENSSL_3_1 = 0x30100000


def encryption() -> Finding:
    """The library that encrypts connections between hosts."""
    found = ask()
    if found.problem and os.environ.get("BAGUA_PLAIN_DATA") == "1":
        detail = f"none ({found.problem}); BAGUA_PLAIN_DATA=1 leaves connections between hosts plain"
        return Finding(NAME, WARN, detail, "Fine on networks that are protected otherwise.")
    return judge(found, processor_flags())


def judge(found: Probe, flags: set[str]) -> Finding:
    """The finding for a library on a processor with these instruction sets."""
    if found.problem:
        fix = (
            "Install OpenSSL 1.1.1 or 3 (Debian, Ubuntu: apt-get install libssl3), or name its file in "
            "BAGUA_LIBCRYPTO. On networks that are protected otherwise: bagua daemon --plain-data."
        )
        return Finding(NAME, FAIL, f"connections between hosts will fail, no libcrypto: {found.problem}", fix)
    detail = f"{found.version} ({found.path}): {found.cipher}, {found.gb_per_s:.1f} GB/s on one core"
    if 0 < found.number < OPENSSL_3_1 and flags >= WIDE_AES:
        fix = "OpenSSL 3.1 or later encrypts about twice as fast here; BAGUA_LIBCRYPTO names another file."
        return Finding(NAME, WARN, detail, fix)
    return Finding(NAME, OK, detail)


def ask() -> Probe:
    """Runs the probe in a process of its own. Raises nothing."""
    return machine.ask(PROBE, Probe, PROBE_DEADLINE_S, "the library", "opening the library")
