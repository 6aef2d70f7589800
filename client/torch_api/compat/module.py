"""``with_bagua`` and the properties that every ``torch.nn.Module`` gets when ``bagua.torch_api`` is imported."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.comm.groups import BaguaProcessGroup
from bagua.torch_api.compat.model import BaguaDistributedDataParallel
from bagua.torch_api.step.bucket import PlanBucket
from bagua.torch_api.tune import Tuning
from bagua.tuning.options import wanted


class BaguaModule(torch.nn.Module):
    """Members that ``torch.nn.Module`` gets. Never instantiated: ``install`` adds them to ``torch.nn.Module`` itself.

    Properties of a module that is not wrapped are None. They must not raise: torch.compile reads each name of a module.
    """

    bagua_ddp: BaguaDistributedDataParallel

    def _bagua_wrapper(self) -> BaguaDistributedDataParallel | None:
        found: BaguaDistributedDataParallel | None = self.__dict__.get("bagua_ddp")
        return found

    @property
    def bagua_module_name(self) -> str | None:
        """Name of the model in messages; may be set before ``with_bagua``."""
        return self.__dict__.get("_bagua_module_name")

    @bagua_module_name.setter
    def bagua_module_name(self, name: str) -> None:
        self._bagua_module_name = name

    @property
    def bagua_algorithm(self) -> AlgorithmImpl | None:
        """The algorithm at work on this model."""
        wrapper = self._bagua_wrapper()
        return wrapper.bagua_algorithm if wrapper is not None else None

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer] | None:
        """The optimizers given to ``with_bagua``."""
        wrapper = self._bagua_wrapper()
        return wrapper.bagua_optimizers if wrapper is not None else None

    @property
    def bagua_buckets(self) -> list[PlanBucket] | None:
        """The buckets in which gradients, or weights, travel."""
        wrapper = self._bagua_wrapper()
        return wrapper.bagua_buckets if wrapper is not None else None

    def with_bagua(
        self,
        optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer,
        algorithm: Algorithm | None = None,
        process_group: BaguaProcessGroup | None = None,
        do_flatten: bool = True,
        *,
        step_in_backward: bool = False,
        autotune: bool | None = None,
        tune: Mapping[str, Sequence[object]] | None = None,
    ) -> BaguaModule:
        """Makes training of this model distributed; returns the model itself.

        Parameters, buffers and the optimizers' state become rank 0's. From then on gradients, or weights, are exchanged
        as the algorithm says: with most, ``backward()`` ends with gradients that have been exchanged. May be called
        again, on all ranks, to change the algorithm or the optimizers. A deep copy of a wrapped model is not wrapped.
        See ``BaguaDistributedDataParallel``.

        Args:
            optimizers: Those that train this model.
            algorithm: For example ``GradientAllReduceAlgorithm()``. None: what environment variable BAGUA_ALGORITHM
                says (``bagua run --algorithm``), else gradient all-reduce.
            process_group: The ranks that train this model, which alone call this. None: all ranks.
            do_flatten: Accepted for programs that pass it, and handed to the algorithm's ``tensors_to_buckets``.
                Gradients and parameters are always memory of the program's own.
            step_in_backward: Parameters of a bucket move inside ``backward()``, as soon as its result is there, while
                others travel; ``optimizer.step()`` finishes and checks. The bits are the same. For algorithms that
                exchange gradients, and programs that call ``optimizer.step()`` right after ``backward()``.
            autotune: The job tries settings of the exchange while it trains, and keeps the best. None: as environment
                variable BAGUA_AUTOTUNE says (``bagua run --autotune``).
            tune: Values to try, by name of the setting: "bucket_kib", "chunk_kib", and "codec", which changes results
                and is tuned only if it is listed here.

        Raises BaguaError, on every rank, if the ranks' models or optimizers differ. With ``step_in_backward``:
        ConfigError for LBFGS and algorithms that exchange other things than gradients; ``optimizer.step()`` raises
        BaguaError if gradients were changed after backward (clipping, GradScaler), or if it gets a closure.
        """
        options = wanted(autotune, tune)
        previous = self.__dict__.get("bagua_ddp")
        # A copy of the module has the attribute, too, and is wrapped anew.
        if previous is not None and previous.module is self:
            previous.close()
        name = self.__dict__.setdefault("_bagua_module_name", f"{type(self).__name__}_{id(self)}")
        self.bagua_ddp = BaguaDistributedDataParallel(
            self,
            optimizers,
            algorithm,
            process_group,
            bagua_module_name=name,
            gradient_as_bucket_view=do_flatten,
            step_in_backward=step_in_backward,
            tuner=None if options is None else functools.partial(Tuning, options),
        )
        return self


with_bagua = BaguaModule.with_bagua


class _Member:
    """A property that ``torch.jit`` takes no notice of: it compiles all that are a ``property``."""

    def __init__(self, of: property) -> None:
        self._of = of
        self.__doc__ = of.__doc__

    def __get__(self, module: torch.nn.Module | None, kind: type) -> Any:
        return self if module is None else self._of.__get__(module, kind)

    def __set__(self, module: torch.nn.Module, value: Any) -> None:
        self._of.__set__(module, value)


def install() -> None:
    """Adds the members of ``BaguaModule`` to ``torch.nn.Module``."""
    for name, member in vars(BaguaModule).items():
        if isinstance(member, property):
            setattr(torch.nn.Module, name, _Member(member))
        elif name in ("with_bagua", "_bagua_wrapper"):
            setattr(torch.nn.Module, name, member)
