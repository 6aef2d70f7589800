"""Codes of the installation and of the native parts."""

from __future__ import annotations

from bagua.error_codes.entry import Area, Entry

AREA = Area(
    "installation",
    "Installation and native parts",
    "`bagua doctor` checks all of this, and says how to mend each problem.",
    (
        Entry(
            "BG201",
            "This system is not Linux",
            "Daemons and ranks share memory in ways that only Linux has.",
            "Use a Linux machine or a Linux container. Under Windows, WSL 2 is one.",
        ),
        Entry(
            "BG202",
            "torch or ninja is missing in this environment",
            "The native core is compiled against the torch of the environment in which Bagua runs, by ninja.",
            "`pip install torch ninja` in this environment, the same on every host. If they are installed, another "
            "Python runs: compare `which python` and `which bagua`.",
        ),
        Entry(
            "BG203",
            "There is no C++ compiler",
            "The native core is compiled at the first start, and the compiler (`g++`, or the one that `CXX` names) "
            "was not found.",
            "Install one: `apt-get install g++` (Debian, Ubuntu), `dnf install gcc-c++` (Fedora).",
        ),
        Entry(
            "BG204",
            "Compiling failed",
            "The compiler reported an error or took too long. The last lines of its output are in the error. A "
            "failed build is remembered, so that each start does not repeat it.",
            "Run `bagua doctor`: it checks compiler, ninja and torch. Frequent causes are a compiler without "
            "C++17, too little memory, and headers of torch that do not belong to the installed version.",
        ),
        Entry(
            "BG205",
            "A compiled part can't be loaded",
            "The file in the cache is damaged, or libraries with which it was linked are missing or were replaced.",
            "Remove the folder that the error names: the part is built again at the next start.",
        ),
        Entry(
            "BG206",
            "The folder for compiled parts can't be written",
            "Compiled parts are kept in `~/.cache/bagua`, or in the folder that `BAGUA_CACHE_DIR` names, and that "
            "can't be written: no permission, a read-only file system, or no room.",
            "Set `BAGUA_CACHE_DIR` to a folder that you can write, for daemons and ranks alike.",
        ),
        Entry(
            "BG207",
            "CUDA kernels can't be built or used",
            "The CUDA compiler `nvcc` was not found, an architecture is unknown or too old (8.0 is the least), or "
            "an operation needs the library of kernels and it could not be built.",
            "Install the CUDA toolkit and name it in `CUDA_HOME`, or `pip install` nvcc with the packages that the "
            "error names. Write architectures as numbers: `BAGUA_CUDA_ARCHS='8.0;9.0+PTX'`. Without kernels choose "
            "no codec, or `everywhere=False`.",
        ),
        Entry(
            "BG208",
            "The installation is not complete",
            "Source files of a native part are missing beside the Python files.",
            "Install Bagua again from a wheel or a complete checkout.",
        ),
        Entry(
            "BG209",
            "An optional package is missing",
            "This command or feature needs a Python package that Bagua does not install by itself.",
            "Run the `pip install` that the error names, in the environment of `bagua`; for features of ranks on "
            "every host.",
        ),
        Entry(
            "BG210",
            "A program is missing",
            "The command needs a program of the system, such as `ssh`, `iperf3`, `redis-server` or PostgreSQL, "
            "which is not in `PATH`.",
            "Install it by the system's package manager, or use the alternative that the error names.",
        ),
        Entry(
            "BG211",
            "The network plugin for NCCL can't be used",
            "The plugin Bagua-Net could not be loaded, found no network interface that it may use, or lies in a "
            "folder whose name can't stand in `LD_LIBRARY_PATH`.",
            "`bagua net show` lists the interfaces that it finds. Choose another folder with `BAGUA_CACHE_DIR`; "
            "name interfaces with `NCCL_SOCKET_IFNAME`.",
        ),
        Entry(
            "BG212",
            "Python's header files are missing",
            "The native core includes `Python.h`. Debian, Ubuntu and Fedora have it in a package of its own, which "
            "does not come with `python3`.",
            "Install it: `apt-get install python3-dev` (Debian, Ubuntu), `dnf install python3-devel` (Fedora). It must "
            "be the one of the Python that the environment was made with: `python3.12-dev` for `python3.12`.",
        ),
        Entry(
            "BG213",
            "Another file or folder named bagua is in the way",
            "Python looks for packages in the folder of the program, or in the one in which it was started, before it "
            "looks where packages are installed. A `bagua.py` there, or a folder `bagua`, such as a clone of the "
            "original, takes the place of this package.",
            "Rename it, or start the program from another folder. `python -P` leaves that folder out of the search.",
        ),
    ),
)
