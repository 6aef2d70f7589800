"""Settings of the operator, from the command line and the environment (``BAGUA_OPERATOR_...``)."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

TAINTS = (
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/out-of-service",
    "node.kubernetes.io/unschedulable",  # cordoned, as by `kubectl drain`
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "cloud.google.com/impending-node-termination",
    "kubernetes.azure.com/scalesetpriority-eviction",
)
"""Taints of a machine that will go away, or is away."""


class Settings(BaseSettings):
    """Settings of the operator, constant after construction."""

    model_config = SettingsConfigDict(env_prefix="BAGUA_OPERATOR_", frozen=True)

    namespaces: tuple[str, ...] = ()
    """Empty: all."""
    poll_s: float = Field(default=5.0, gt=0, le=600)
    """Pause between two looks at a job that runs; changes in Kubernetes are seen at once."""
    secret_delay_s: float = Field(default=120.0, ge=0, le=3_600)
    """Kubelets have written changed Secrets into pods after so long."""
    renew_before_days: float = Field(default=90.0, ge=0)
    """Certificates are made anew so long before they expire."""
    issuer: str = ""
    """cert-manager makes the certificates: KIND/NAME, as ClusterIssuer/bagua."""
    taints: tuple[str, ...] = TAINTS
    """A machine with one of these will go away."""
    metrics: str = ""
    """HOST:PORT where metrics are served; empty: nowhere."""
    liveness: str = ""
    """http://HOST:PORT/PATH where the operator says that it lives."""
