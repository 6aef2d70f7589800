"""The leg's own declarations of CUDA and NCCL against the real headers, where this machine has them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"


def _wheels() -> list[Path]:
    """Include folders of NVIDIA's wheels in this environment."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return [folder for root in roots for folder in sorted(root.glob("*/include"))]


def _toolkit() -> list[Path]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return []
    return [path for root in Path(nvcc).resolve().parents[:2] for path in root.glob("**/include") if path.is_dir()]


def _folder_with(header: str) -> Path | None:
    candidates = [*_toolkit(), *_wheels(), Path("/usr/local/cuda/include"), Path("/usr/include")]
    return next((folder for folder in candidates if (folder / header).is_file()), None)


def _check(definition: str, include: Path) -> None:
    command = [
        "g++",
        "-std=c++17",
        "-fsyntax-only",
        "-Wno-enum-compare",
        f"-D{definition}",
        f"-I{CSRC / 'core'}",
        f"-I{CSRC}",
        f"-isystem{include}",
    ]
    cuda = _folder_with("cuda_runtime_api.h")
    command += [f"-isystem{cuda}"] if cuda else []
    result = subprocess.run([*command, str(HERE / "abi_check.cpp")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_cuda() -> None:
    include = _folder_with("cuda_runtime_api.h")
    if include is None or not (include / "cuda.h").is_file():
        pytest.skip("no cuda_runtime_api.h: neither a CUDA toolkit nor NVIDIA's wheels are installed")
    _check("WITH_CUDA", include)


def _nccl_headers() -> list[Path]:
    """Folders with nccl.h: those of ``deploy/dev.py test``, else the first that is found."""
    given = [Path(folder) / "include" for folder in os.environ.get("BAGUA_TEST_NCCL", "").split(os.pathsep) if folder]
    found = _folder_with("nccl.h")
    return given or ([found] if found else [])


def test_nccl() -> None:
    headers = _nccl_headers()
    if not headers or _folder_with("cuda_runtime_api.h") is None:
        pytest.skip("no nccl.h (in folders of $BAGUA_TEST_NCCL, or with the wheel nvidia-nccl-cu13) or no CUDA headers")
    for include in headers:
        _check("WITH_NCCL", include)
