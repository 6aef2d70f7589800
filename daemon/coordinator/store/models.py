"""The tables. A change here needs a migration in ``migrations/versions``; a test compares the two."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _job_id() -> Column[str]:
    return Column("job_id", String(64), ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True)


jobs = Table(
    "jobs",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("idempotency_key", String(200), unique=True),  # NULL: none was given
    Column("name", String(200), nullable=False),
    Column("brief", LargeBinary, nullable=False, server_default=""),  # the spec without what makes it large
    Column("state", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("outcome", Integer),
    Column("cancel_reason", Text),
    Column("generation", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("finished_at", Float, nullable=False),
    Column("submitted_clock", Float, nullable=False),  # readings of the service clock
    Column("placed_clock", Float, nullable=False),
    Column("stopping_clock", Float, nullable=False),
    Column("stalls", Integer, nullable=False, server_default="0"),
    Column("passes", BigInteger, nullable=False, server_default="0"),
    Column("stalled_passes", BigInteger, nullable=False, server_default="0"),
    Column("accusations", Text, nullable=False, server_default=""),  # a list of pairs in JSON; empty: none
    Column("put_out", Text, nullable=False, server_default=""),  # a list of (node, boot id, clock) in JSON
    Column("plan", Integer, nullable=False, server_default="0"),
    Column("wanted_nodes", Integer, nullable=False, server_default="0"),
    Column("paused", Boolean, nullable=False, server_default=false()),
    Column("next_member", Integer, nullable=False, server_default="0"),
    Column("patience_s", Float, nullable=False, server_default="0"),
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("retry_clock", Float, nullable=False, server_default="0"),
    Column("respawns", Text, nullable=False, server_default=""),  # a list of (node, clock) in JSON; empty: none
    Column("master_addr", String(255), nullable=False),
    Column("master_port", Integer, nullable=False),
    Column("job_key", LargeBinary, nullable=False),
    Column("last_event", Integer, nullable=False),  # seq of the newest event
    Column("revision", Integer, nullable=False),  # goes up with every change
    Column("lease_owner", String(64)),  # the coordinator that may decide
    Column("namespace", String(64), nullable=False, server_default="default"),
    Column("submitted_by", String(200), nullable=False, server_default=""),
    Column("unix_user", String(200), nullable=False, server_default=""),  # of its ranks; empty: none
    Index("ix_jobs_state_created_at", "state", "created_at"),
    Index("ix_jobs_finished_at", "finished_at"),
    Index("ix_jobs_created_at_job_id", "created_at", "job_id"),
    Index("ix_jobs_namespace_created_at_job_id", "namespace", "created_at", "job_id"),
)

job_specs = Table(
    "job_specs",
    metadata,
    _job_id(),
    Column("spec", LargeBinary, nullable=False),  # serialized bagua.v1.JobSpec
)

job_hosts = Table(
    "job_hosts",
    metadata,
    _job_id(),
    # In the order of the current generation; negative: a part that is out of it, or not yet in it (joining).
    Column("host_index", Integer, primary_key=True, autoincrement=False),
    Column("node_id", String(200), nullable=False),
    Column("hostname", String(255), nullable=False),
    Column("address", String(255), nullable=False),
    Column("boot_id", String(200), nullable=False),
    Column("first_rank", Integer, nullable=False),
    Column("nranks", Integer, nullable=False),
    Column("phase", Integer, nullable=False),
    Column("engine_address", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("error_clock", Float, nullable=False),
    Column("waiting", Text, nullable=False),
    Column("suspended", Text, nullable=False, server_default=""),
    Column("suspended_clock", Float, nullable=False, server_default="0"),
    Column("lost_hosts", Text, nullable=False, server_default=""),  # a list of nodes in JSON; empty: none
    Column("accused", Text, nullable=False, server_default=""),  # the same
    Column("withdrawn", Boolean, nullable=False, server_default=false()),
    Column("last_generation", Integer, nullable=False, server_default="0"),  # of a former part; 0: it is a current one
    Column("entered", Integer, nullable=False, server_default="0"),
    Column("takes_newcomers", Boolean, nullable=False, server_default=false()),
    Column("joining", Boolean, nullable=False, server_default=false()),
    Column("dismissed", Boolean, nullable=False, server_default=false()),
    Column("since_clock", Float, nullable=False, server_default="0"),
    # The ranks, as a list of lists in JSON; empty: all of them wait. One row is written for whatever a node says.
    Column("ranks", Text, nullable=False),
    Index("ix_job_hosts_node_id_phase", "node_id", "phase"),
)

events = Table(
    "events",
    metadata,
    _job_id(),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("time", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("reason", Text, nullable=False),
    Column("generation", Integer, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("node_id", String(200), primary_key=True),
    Column("hostname", String(255), nullable=False),
    Column("address", String(255), nullable=False),
    Column("slots", Integer, nullable=False),
    Column("version", String(64), nullable=False),
    Column("boot_id", String(200), nullable=False),
    Column("last_seen", Float, nullable=False),
    Column("owner", String(64)),  # the coordinator that held its session when this was written, NULL: nobody
    Column("draining", Boolean, nullable=False, server_default=false()),  # as a user has asked
    Column("leaving", Boolean, nullable=False, server_default=false()),  # as its daemon says
    Column("wire_version", Integer, nullable=False, server_default="0"),
)

code_archives = Table(
    "code_archives",
    metadata,
    Column("digest", String(64), primary_key=True),  # SHA-256 of the archive, in hex
    Column("bytes", Integer, nullable=False),
    Column("complete", Boolean, nullable=False),  # all pieces are there
    Column("used_at", Float, nullable=False),
)

code_pieces = Table(
    "code_pieces",
    metadata,
    Column("digest", String(64), ForeignKey("code_archives.digest", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

code_grants = Table(
    "code_grants",
    metadata,
    # A namespace that has sent the whole archive once: knowing its digest is not enough.
    Column("digest", String(64), ForeignKey("code_archives.digest", ondelete="CASCADE"), primary_key=True),
    Column("namespace", String(64), primary_key=True),
)

job_code = Table(
    "job_code",
    metadata,
    _job_id(),
    Column("digest", String(64), nullable=False, index=True),  # it may have been forgotten since the job has ended
)

coordinators = Table(
    "coordinators",
    metadata,
    Column("owner", String(64), primary_key=True),
    # Its service clock at its last beat. Others see it change, by their own clocks, as long as the coordinator lives.
    Column("clock", Float, nullable=False),
    Column("address", String(300), nullable=False, server_default=""),  # host:port for others; empty: not known
    Column("machine", String(200), nullable=False, server_default=""),  # where an address of the loopback means it
    # By the service clock: since when others can know of it. 0: from the beginning.
    Column("arrived_clock", Float, nullable=False, server_default="0"),
)

tune_studies = Table(
    "tune_studies",
    metadata,
    Column("study_id", String(64), primary_key=True),
    Column("study", LargeBinary, nullable=False),  # serialized bagua.v1.TuneStudy
    Column("settled", Boolean, nullable=False),
    Column("best", Text, nullable=False),  # the setting in JSON; empty: no job has settled yet
    Column("line", Text, nullable=False),
    Column("job_id", String(64), nullable=False, index=True),  # the last one; it may have been forgotten since
    Column("updated_at", Float, nullable=False),
    Column("namespace", String(64), nullable=False, server_default="default"),
)

tune_trials = Table(
    "tune_trials",
    metadata,
    Column("study_id", String(64), ForeignKey("tune_studies.study_id", ondelete="CASCADE"), primary_key=True),
    Column("job_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("time", Float, nullable=False),
    Column("trial", LargeBinary, nullable=False),  # serialized bagua.v1.TuneTrial
)

tokens = Table(
    "tokens",
    metadata,
    Column("token_id", String(64), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("role", String(16), nullable=False),
    Column("namespace", String(64), nullable=False),  # *: all
    Column("digest", String(64), nullable=False),  # SHA-256 of the whole token, in hex
    Column("created_at", Float, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("expires_at", Float, nullable=False),  # 0: never
    Column("revoked_at", Float, nullable=False),  # 0: it is good
    Column("unix_user", String(200), nullable=False, server_default=""),  # of its jobs; empty: none
)

audit = Table(
    "audit",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("who", String(200), nullable=False),
    Column("role", String(16), nullable=False),
    Column("namespace", String(64), nullable=False),
    Column("method", String(100), nullable=False),
    Column("target", String(200), nullable=False),
    Column("outcome", String(40), nullable=False),  # OK, or a status code
    Column("detail", Text, nullable=False),
    Column("peer", String(200), nullable=False),
    Index("ix_audit_time", "time"),
)
