"""Parts of a trace, out of the coordinator's messages."""

from __future__ import annotations

from bagua.proto import common_pb2
from bagua.timeline.trace import Source, Span


def source_of(part: common_pb2.TracePart) -> Source:
    spans = [
        Span(span.phase, span.name, span.begin_ns, span.end_ns, span.sequence, span.comm, span.peer, span.bytes)
        for span in part.spans
    ]
    return Source(
        part.node_id, part.rank, part.hostname, part.member, spans, part.dropped, part.missing, tuple(part.hosts)
    )
