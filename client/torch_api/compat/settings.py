"""Settings of the original that are not needed here, or that the library reads by itself: variables of the environment,
and its service for tuning."""

from __future__ import annotations

import math
import os
from typing import Any, NoReturn

import torch

from bagua.base.errors import ConfigError
from bagua.torch_api.job.environment import read_int

version = torch.__version__
"""Of torch. The library's own is ``bagua.__version__``."""


def get_bagua_service_port() -> int:
    """BAGUA_SERVICE_PORT, else -1. Nothing listens there."""
    return read_int("BAGUA_SERVICE_PORT", -1)


def is_report_metrics_switch_on() -> bool:
    """Returns True if BAGUA_REPORT_METRICS is 1. Nothing depends on it: `bagua job show` always has a job's figures."""
    return read_int("BAGUA_REPORT_METRICS", 0) == 1


def get_autotune_level() -> int:
    """BAGUA_AUTOTUNE, else 0."""
    return read_int("BAGUA_AUTOTUNE", 0)


def get_autotune_max_samples() -> int:
    """BAGUA_AUTOTUNE_MAX_SAMPLES, else 60."""
    return read_int("BAGUA_AUTOTUNE_MAX_SAMPLES", 60)


def get_autotune_sampling_confidence_time_s() -> float:
    """BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S, else 5 seconds."""
    return _seconds("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0)


def get_autotune_warmup_time_s() -> float:
    """BAGUA_AUTOTUNE_WARMUP_TIME_S, else 30 seconds."""
    return _seconds("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30.0)


def get_is_output_autotune_log() -> bool:
    """Returns True if BAGUA_IS_OUTPUT_AUTOTUNE_LOG is another number than 0. (In the original "0" counts as true.)"""
    return read_int("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", 0) != 0


def get_autotune_server_wait_time() -> int:
    """BAGUA_AUTOTUNE_SERVER_WAIT_TIME, else 300 seconds. There is no server to wait for."""
    return read_int("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", 300)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        found = float(text) if text else default
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:  # NaN fails the comparison, too
        raise ConfigError(f"Environment variable {name} is {text!r}: it must be a number of seconds. [BG106]")
    return found


def start_autotune_server(*_: Any, **__: Any) -> NoReturn:
    """The original's service for tuning, and its client. Raises NotImplementedError: the coordinator tunes jobs."""
    raise NotImplementedError(
        "No job has a tuning service of its own: remove the call. Use bagua run --autotune, where you want it. [BG412]"
    )


get_hyperparameters_service_client = start_autotune_server
