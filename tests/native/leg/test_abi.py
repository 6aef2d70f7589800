"""The leg's own declarations of CUDA and NCCL against the real headers, where this machine has them."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"


def folder_with(header):
    """Of a CUDA toolkit, or of NVIDIA's wheels in this environment."""
    nvcc, spec = shutil.which("nvcc"), importlib.util.find_spec("nvidia")
    roots = list(Path(nvcc).resolve().parents[:2]) if nvcc else []
    found = [path for root in roots for path in root.glob("**/include") if path.is_dir()]
    wheels = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found += [folder for root in wheels for folder in sorted(root.glob("*/include"))]
    found += [Path("/usr/local/cuda/include"), Path("/usr/include")]
    return next((folder for folder in found if (folder / header).is_file()), None)


def check(definition, *folders):
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-enum-compare", f"-D{definition}", f"-I{CSRC}"]
    command += [f"-I{CSRC / 'core'}", *(f"-isystem{folder}" for folder in folders), str(HERE / "abi_check.cpp")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_cuda():
    include = folder_with("cuda_runtime_api.h")
    if include is None or not (include / "cuda.h").is_file():
        pytest.skip("no cuda_runtime_api.h: neither a CUDA toolkit nor NVIDIA's wheels are installed")
    check("WITH_CUDA", include)


def test_nccl():
    """The headers of ``deploy/dev.py test``, else the first that are found."""
    given = [Path(folder) / "include" for folder in os.environ.get("BAGUA_TEST_NCCL", "").split(os.pathsep) if folder]
    headers, cuda = given or list(filter(None, [folder_with("nccl.h")])), folder_with("cuda_runtime_api.h")
    if not headers or cuda is None:
        pytest.skip("no nccl.h (in folders of $BAGUA_TEST_NCCL, or with the wheel nvidia-nccl-cu13) or no CUDA headers")
    for include in headers:
        check("WITH_NCCL", include, cuda)
