"""Traces of a job reach a receiver of OpenTelemetry's protocol: from `bagua job submit` to the ranks, as one trace."""

import os
import signal
import threading
from concurrent import futures

import grpc
import pytest
from rig.docs import pages
from rig.ranks.elastic import PROGRAM

from bagua.base.trace_context import parse

SOON_S = 90.0
STEP = """
from bagua.proto import common_pb2
print("context", os.environ["TRACEPARENT"], os.environ["BAGUA_TRACE_STEPS"], flush=True)
step = common_pb2.SampledStep(step=7000, began=time.time() - 1, seconds=0.5, compute=0.4, exposed=0.1)
service.ReportProgress(common_pb2.Progress(job_id=job, rank=me, step=7000, sampled=step), timeout=60)
"""


class Receiver:
    """An OTLP receiver over gRPC that keeps all spans: (service, span)."""

    def __init__(self):
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        grpc_code = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
        self._lock = threading.Lock()
        self._spans = []
        outer = self

        class Servicer(grpc_code.TraceServiceServicer):
            def Export(self, request, context):
                for resource in request.resource_spans:
                    names = {one.key: one.value.string_value for one in resource.resource.attributes}
                    with outer._lock:
                        for scope in resource.scope_spans:
                            outer._spans += [(names["service.name"], span) for span in scope.spans]
                return service.ExportTraceServiceResponse()

        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        grpc_code.add_TraceServiceServicer_to_server(Servicer(), self._server)
        self.address = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def named(self, name):
        with self._lock:
            return [(service, span) for service, span in self._spans if span.name == name]

    def all(self):
        with self._lock:
            return list(self._spans)

    def close(self):
        self._server.stop(0).wait()


@pytest.fixture
def receiver():
    made = Receiver()
    try:
        yield made
    finally:
        made.close()


def test_one_trace_from_submission_to_step(idle_service, sandbox, receiver):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    export, submit = pages.run_by("test_one_trace_from_submission_to_step", "docs/observability.md")
    name, _, address = export.removeprefix("export ").partition("=")
    assert (address, submit) == ("http://127.0.0.1:4317", "bagua job submit train.py")
    sandbox.env |= {name: receiver.address, "BAGUA_TRACE_STEPS": "500"}
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 1)
    service.start_node("node-b", 1)
    head, tail = PROGRAM.split("def main():", 1)
    sandbox.script("train.py", f"{head}{STEP}\ndef main():{tail}")
    job_id = service.submit("--elastic", "--nnodes", "2", *submit.split()[3:])
    job = service.wait_for_state(job_id, ["running"], within=SOON_S)
    victim = next(rank for rank in job["ranks"] if rank["rank"] == 1)
    sandbox.wait_until(lambda: len(receiver.named("bagua.step")) == 2, SOON_S, lambda: str(receiver.all()))
    os.kill(victim["pid"], signal.SIGKILL)
    wanted = {
        *("bagua.submit", "bagua.queue", "bagua.launch", "bagua.start", "bagua.prepare", "bagua.start_ranks"),
        *("bagua.step", "bagua.membership_change", "bagua.enter_generation", "bagua.job"),
    }
    sandbox.wait_until(lambda: receiver.named("bagua.membership_change"), SOON_S, lambda: str(receiver.all()))
    (sandbox.folder / "stop").touch()
    service.wait_for_state(job_id, ["succeeded"], within=SOON_S)
    sandbox.wait_until(lambda: {span.name for _, span in receiver.all()} >= wanted, SOON_S, lambda: str(receiver.all()))

    spans = [span for _, span in receiver.all()]
    assert len({span.trace_id for span in spans}) == 1
    ids = {span.span_id for span in spans}
    assert {span.name for span in spans if span.parent_span_id not in ids} == {"bagua.submit"}
    assert {service for service, _ in receiver.all()} == {"bagua", "bagua-coordinator", "bagua-daemon"}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans)
    changes = [span for _, span in receiver.named("bagua.membership_change")]  # on a busy machine there may be more
    assert len({span.span_id for span in changes}) == len(changes)
    reasons = [one.value.string_value for span in changes for one in span.attributes if one.key == "bagua.reason"]
    assert any("rank 1" in reason or "lost" in reason for reason in reasons), reasons
    output = service.call("job", "logs", job_id).out
    context = parse(output.split("context ", 1)[1].split()[0])
    assert context is not None and context.trace_id.to_bytes(16, "big") == spans[0].trace_id
    assert " 500" in output


TRAINING = """
import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import gradient_allreduce

bagua.init_process_group()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
for _ in range(40):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.full  # a rank that imports torch
def test_steps_of_a_training_are_sampled(sandbox, receiver):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address, "BAGUA_TRACE_STEPS": "10"}
    done = sandbox.bagua("run", sandbox.script("train.py", TRAINING), env=env)
    assert done.code == 0, done.text
    sandbox.wait_until(lambda: receiver.named("bagua.job"), SOON_S, lambda: str(receiver.all()))
    steps = receiver.named("bagua.step")  # the daemon ends after its last span was sent
    assert steps and {service for service, _ in steps} == {"bagua-daemon"}, receiver.all()
    assert {span.trace_id for _, span in steps} == {span.trace_id for _, span in receiver.all()}
    for _, span in steps:
        found = {one.key: one.value for one in span.attributes}
        assert found["bagua.step"].int_value % 10 == 0 and span.end_time_unix_nano > span.start_time_unix_nano
