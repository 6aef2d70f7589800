"""``bagua doctor`` on encryption: which libcrypto connections between hosts will use, and how fast it is."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import time
from pathlib import Path

from bagua.cli.checks import machine
from bagua.cli.checks.machine import FAIL, OK, WARN, Finding

NAME = "encryption"
PROBE = ["-m", "bagua.cli.checks.crypto_checks"]
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


# The same as in csrc (transport/libcrypto.cpp); a test compares them.
VARIABLE = "BAGUA_LIBCRYPTO"
NAMES = ("libcrypto.so.3", "libcrypto.so.1.1")
FUNCTIONS = (
    "OpenSSL_version",
    "EVP_aes_256_gcm",
    "EVP_chacha20_poly1305",
    "EVP_CIPHER_CTX_new",
    "EVP_CIPHER_CTX_free",
    "EVP_CIPHER_CTX_ctrl",
    "EVP_EncryptInit_ex",
    "EVP_EncryptUpdate",
    "EVP_EncryptFinal_ex",
    "EVP_DecryptInit_ex",
    "EVP_DecryptUpdate",
    "EVP_DecryptFinal_ex",
    "EVP_PKEY_new_raw_private_key",
    "EVP_PKEY_new_raw_public_key",
    "EVP_PKEY_get_raw_public_key",
    "EVP_PKEY_free",
    "EVP_PKEY_CTX_new",
    "EVP_PKEY_CTX_free",
    "EVP_PKEY_derive_init",
    "EVP_PKEY_derive_set_peer",
    "EVP_PKEY_derive",
)
X25519 = 1034  # NID_X25519
PIECE_BYTES = 64 << 10
MEASURED_S = 0.05


@dataclasses.dataclass(frozen=True)
class Probe:
    """``version``: text of the library; ``number``: its OpenSSL_version_num, 0 if unknown; ``gb_per_s``: what one core
    encrypts with ``cipher``; ``problem``: why the library can't be used, "" if it can."""

    version: str = ""
    number: int = 0
    path: str = ""
    cipher: str = ""
    gb_per_s: float = 0.0
    problem: str = ""


class Unfit(Exception):
    """The library can't encrypt connections; the text says why."""


class _LinkMap(ctypes.Structure):
    """The head of glibc's struct link_map."""

    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


def processor_flags() -> set[str]:
    """Names of the first processor's instruction sets, as the kernel spells them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def open_library() -> ctypes.CDLL:
    """The file that the variable names, else a library that the process has loaded already, else the system's.
    Raises Unfit."""
    chosen = os.environ.get(VARIABLE)
    if chosen == "":
        raise Unfit(f"{VARIABLE} is empty")
    # A daemon has loaded the libcrypto of Python's ssl module when the core looks for one.
    with contextlib.suppress(ImportError):
        import ssl  # noqa: F401
    why = ""
    for mode in (os.RTLD_NOLOAD, 0):
        for name in NAMES if chosen is None else (chosen,):
            try:
                return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_LOCAL | mode)
            except OSError as error:
                why = str(error)
    raise Unfit(why)


def path_of(library: ctypes.CDLL) -> str:
    link_map = ctypes.POINTER(_LinkMap)()
    link_map_request = 2  # RTLD_DI_LINKMAP
    handle = ctypes.c_void_p(library._handle)
    if ctypes.CDLL(None).dlinfo(handle, link_map_request, ctypes.byref(link_map)) or not link_map:
        return library._name
    return (link_map.contents.l_name or b"").decode() or library._name


def check(library: ctypes.CDLL) -> None:
    """Raises Unfit if a function or the key exchange is missing."""
    for name in FUNCTIONS:
        if not hasattr(library, name):
            raise Unfit(f"{path_of(library)} has no {name}")
    library.EVP_PKEY_new_raw_private_key.restype = ctypes.c_void_p
    key = library.EVP_PKEY_new_raw_private_key(X25519, None, bytes([1]) * 32, ctypes.c_size_t(32))
    if not key:
        raise Unfit(f"{path_of(library)} offers no X25519 (it may be set to FIPS mode)")
    library.EVP_PKEY_free(ctypes.c_void_p(key))


def speed(library: ctypes.CDLL, function: str) -> float:
    """GB/s that one core encrypts with the cipher that ``function`` returns, in pieces of 64 KiB. Raises Unfit."""
    for name in (function, "EVP_CIPHER_CTX_new"):
        getattr(library, name).restype = ctypes.c_void_p
    cipher, context = getattr(library, function)(), library.EVP_CIPHER_CTX_new()
    arguments = [ctypes.c_void_p(context), ctypes.c_void_p(cipher), None, bytes(32), bytes(12)]
    if not context or library.EVP_EncryptInit_ex(*arguments) != 1:
        raise Unfit(f"{path_of(library)} offers no {function.removeprefix('EVP_')}")
    piece, written = ctypes.create_string_buffer(PIECE_BYTES), ctypes.c_int()

    def encrypt() -> None:
        library.EVP_EncryptUpdate(ctypes.c_void_p(context), piece, ctypes.byref(written), piece, PIECE_BYTES)

    encrypt()
    count, end, began = 0, time.monotonic() + MEASURED_S, time.thread_time()
    while count == 0 or time.monotonic() < end:
        encrypt()
        count += 1
    used = time.thread_time() - began  # of the processor: others may have run meanwhile
    library.EVP_CIPHER_CTX_free(ctypes.c_void_p(context))
    return count * PIECE_BYTES / used / 1e9


def probe() -> Probe:
    try:
        library = open_library()
        check(library)
        library.OpenSSL_version.restype = ctypes.c_char_p
        number = getattr(library, "OpenSSL_version_num", int)  # int() is 0: unknown
        fast_aes = {"aes", "pclmulqdq"} <= (flags := processor_flags()) or {"aes", "pmull"} <= flags
        return Probe(
            version=library.OpenSSL_version(0).decode(),
            number=number(),
            path=path_of(library),
            cipher="AES-256-GCM" if fast_aes else "ChaCha20-Poly1305",
            gb_per_s=speed(library, "EVP_aes_256_gcm" if fast_aes else "EVP_chacha20_poly1305"),
        )
    except Unfit as error:
        return Probe(problem=str(error))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(probe())))
