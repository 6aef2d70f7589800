"""Runs one function of a test file as a rank: ``python rank_main.py FILE FUNCTION RESULT_FILE JSON_ARGUMENTS``.

What the function returns is written to RESULT_FILE with torch.save.
"""

import faulthandler
import importlib.util
import json
import signal
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests

from rig.ranks import placing
from rig.ranks.helpers import find_helpers

warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.4 warns of calls that it makes itself
warnings.filterwarnings("ignore", "Protobuf gencode version")  # protobuf 6 does, of what 7 takes without a word


def main():
    file, function, result_file, arguments = sys.argv[1:]
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2)  # asked by ``Ranks.wait`` where a rank hangs
    placing.prepare()
    find_helpers(file)
    specification = importlib.util.spec_from_file_location("programs", file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["programs"] = module
    specification.loader.exec_module(module)
    torch.save(getattr(module, function)(**json.loads(arguments)), result_file)


if __name__ == "__main__":
    main()
