"""Arguments of ``Client.submit`` that can't be a job."""

from __future__ import annotations

from typing import Any

import pytest

from bagua.base.errors import ConfigError
from bagua.client.specification import job_spec


@pytest.mark.parametrize("env", [{"BATCH": 5}, {"BATCH": None}, {5: "BATCH"}])
def test_a_variable_that_is_no_text_is_named(env: Any) -> None:
    with pytest.raises(ConfigError, match=r"env: .*BATCH|env: 5.*BATCH.*must be texts.*BG107"):
        job_spec("train.py", env=env)
    assert job_spec("train.py", env={"BATCH": "5"}).env == {"BATCH": "5"}
