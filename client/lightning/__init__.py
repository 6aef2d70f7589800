"""Lightning 2: ``Trainer(strategy="bagua")`` after ``import bagua.lightning``, or ``strategy=BaguaStrategy(…)``.

Works with both packages of Lightning, ``lightning`` and ``pytorch_lightning``: names of this module belong to the one
that the program has imported already, or else to the one that is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from bagua.lightning.environment import bagua_environment
from bagua.lightning.reports import report_callback
from bagua.lightning.strategy import bagua_strategy

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    BaguaStrategy: type[DDPStrategy]
    BaguaEnvironment: type[ClusterEnvironment]
    BaguaReport: type[Callback]

__all__ = ["BaguaEnvironment", "BaguaReport", "BaguaStrategy"]


def _package() -> str:
    """The package of Lightning whose classes a program gets. Raises ModuleNotFoundError where there is none."""
    for name in PACKAGES:
        if name in sys.modules:  # the program's own package: classes of the two don't mix
            return name
    for name in PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ModuleNotFoundError(
        'bagua.lightning needs Lightning 2: pip install "bagua[lightning]". [BG209]', name="lightning"
    )


@functools.cache
def _classes(package: str) -> dict[str, Any]:
    """The classes of this module over those of ``package``. Its strategies then have one named "bagua", too."""
    strategies = importlib.import_module(f"{package}.strategies")
    callbacks = importlib.import_module(f"{package}.callbacks")
    environments = importlib.import_module(f"{package}.plugins.environments")
    environment = bagua_environment(environments.ClusterEnvironment)
    made = {
        "BaguaEnvironment": environment,
        "BaguaReport": report_callback(callbacks.Callback),
        "BaguaStrategy": bagua_strategy(strategies.DDPStrategy, environment),
    }
    for name, made_class in made.items():
        made_class.__module__, made_class.__qualname__ = __name__, name  # pickles and messages name the public path
    if "bagua" not in strategies.StrategyRegistry:
        made["BaguaStrategy"].register_strategies(strategies.StrategyRegistry)
    return made


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _classes(_package())[name]


_classes(_package())  # registers the strategy: Trainer(strategy="bagua") needs the import alone
