"""A rank of a pool (pool.py)."""

import gc
import importlib.util
import os
import pickle
import socket
import sys
import traceback
import warnings
from pathlib import Path

import torch

import bagua.torch_api as bagua
from rig.ranks.helpers import find_helpers


def rank_serve(address):
    """Runs tasks until the pool closes the channel. A task that raises is this rank's last one: the others, which may
    wait for its part, hear of its end."""
    bagua.init_process_group()
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    stream = channel.makefile("rb")
    channel.sendall(pickle.dumps(bagua.get_rank()))
    files = {}
    while True:
        try:
            task = pickle.load(stream)
        except EOFError:
            os._exit(0)  # the engine ends with the pool
        answer, error = run(*task, files)
        channel.sendall(answer)
        if error:
            os._exit(1)


def run(file, function, arguments, files):
    """The pool's answer: the function's result, or the error that kept it from one. The next function finds the
    process as this one did."""
    torch.manual_seed(0)
    error = ""
    try:
        with warnings.catch_warnings():
            if file not in files:
                files[file] = load(file)
            answer = pickle.dumps((getattr(files[file], function)(**arguments), ""))
    except BaseException:
        error = traceback.format_exc()
        answer = pickle.dumps((None, error))
    sys.stdout.flush()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    gc.collect()  # models of the function, so that their memory goes back at the same time on all ranks
    return answer, bool(error)


def load(file):
    """The module of a test's file."""
    find_helpers(file)
    specification = importlib.util.spec_from_file_location(f"of_pool_{Path(file).stem}", file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module
