"""Parses the coordinator's settings once, from command line and environment (``BAGUA_COORDINATOR_...``)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from bagua.base.errors import ConfigError
from bagua.base.paths import state_dir
from bagua.base.security import TlsFiles


class Settings(BaseSettings):
    """Settings of the coordinator, constant after construction."""

    model_config = SettingsConfigDict(env_prefix="BAGUA_COORDINATOR_", frozen=True)

    listen: str = "127.0.0.1:7670"
    state_dir: Path = Field(default_factory=state_dir)
    database_url: str = ""  # empty: SQLite in the state folder
    tls: Path | None = None  # a folder with ca.pem, cert.pem, key.pem
    auto_tls: str = ""  # a host name: make such a folder for it
    metrics_port: int | None = Field(None, ge=0, le=65535)
    metrics_plain: bool = False  # without TLS: whoever may reach the port may read them
    dashboard: str | None = None  # host:port of the page
    token_file: Path | None = None  # default: <state_dir>/token
    exit_when_idle: float | None = Field(None, ge=0)
    log_json: bool = False  # lines of the log are documents
    # A node says something so often.
    heartbeat_s: float = Field(3.0, gt=0, le=600)
    # After so long without a word a node counts as lost.
    lease_s: float = Field(10.0, gt=0, le=3600)
    # The right to decide about a job, where several coordinators share a database: another one leads after so long,
    # and twice ``coordinator_leases.RESYNC_S``.
    job_lease_s: float = Field(3.0, gt=0, le=3600)
    # A connection that shows no token is shut down after so long.
    stranger_s: float = Field(10.0, gt=0, le=3600)
    # Losses and arrivals within so long become one generation.
    settle_s: float = Field(1.0, ge=0, le=60)
    # After newcomers have failed nobody is started for so long, then twice as long, and so on.
    rejoin_s: float = Field(60.0, gt=0, le=3600)
    # A daemon that can't renew its lease for so long ends its ranks; 0: never.
    fence_after: float = Field(60.0, ge=0, le=86_400)
    # Without coordinators, or their PostgreSQL, nobody gives a node up for so long. Equal for all over one database.
    outage_s: float = Field(600.0, ge=0, le=86_400)
    # Every rank must have been started so long after its job was placed.
    start_s: float = Field(900.0, gt=0, le=86_400)
    # How much of the past stays; see ``base.keep.parse_keep``.
    keep: str = "30d,10000"
    # Accounts of an OpenID Connect provider; see oidc.parse_grants.
    oidc_issuer: str = ""
    oidc_audience: str = ""
    # Roles of those accounts; see ``oidc.parse_grants``.
    oidc_grants: tuple[str, ...] = ()
    oidc_unix_user: str = ""
    # How much of the audit log stays, in the same words.
    keep_audit: str = "90d,1000000"

    @property
    def folder(self) -> Path:
        """The coordinator's own part of the state folder."""
        return self.state_dir / "coordinator"

    @property
    def token_path(self) -> Path:
        """Path of the credential."""
        return self.token_file or self.state_dir / "token"

    @property
    def tls_folder(self) -> Path | None:
        """Folder of the certificates; None: no TLS."""
        return self.state_dir / "tls" if self.auto_tls and self.tls is None else self.tls

    @property
    def tls_files(self) -> TlsFiles | None:
        """The same as paths of files."""
        folder = self.tls_folder
        return None if folder is None else TlsFiles.in_folder(folder)


def make_settings(**given: object) -> Settings:
    """Settings from what was given on the command line (None: not given). Raises ConfigError."""
    try:
        settings = Settings(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise ConfigError(f"{name}: {first['msg']} (given: {first['input']!r}) [BG822]") from error
    if settings.lease_s < 2 * settings.heartbeat_s:
        raise ConfigError(
            f"A lease of {settings.lease_s:g} s is too short for heartbeats every {settings.heartbeat_s:g} s. [BG822]"
        )
    if settings.fence_after and settings.fence_after < settings.lease_s:
        raise ConfigError(
            f"--fence-after {settings.fence_after:g} is shorter than the lease of {settings.lease_s:g} s: daemons "
            "would end ranks that nobody has given up. Give at least the lease, or 0 for never. [BG822]"
        )
    return settings
