"""Programs of ranks that speak to the engine themselves, not through the client library: without torch.

``PROGRAM`` goes on without whoever is lost, and with whoever joins. It adds up member numbers, over and over, and
prints one line for each generation, ``generation 2 rank 1 of 2 sum 3``. With each sum all agree whether to go over to a
planned generation. It ends well when there is a file ``stop`` in its folder, or when it is dismissed."""

JOIN = """
import os, sys, time, grpc
import bagua.csrc
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import rank_pb2
from bagua.proto.rank_pb2_grpc import RankServiceStub
core = bagua.csrc.load()
me, job = int(os.environ["RANK"]), os.environ["BAGUA_JOB_ID"]
channel = grpc.insecure_channel("unix:" + os.environ["BAGUA_DAEMON_SOCKET"])
service = RankServiceStub(channel)
reply = service.Join(rank_pb2.JoinRequest(job_id=job, rank=me, pid=os.getpid(), wire_version=WIRE_VERSION), timeout=60)
rank = core.Rank(data_socket=reply.data_socket, token=reply.data_token, rank=me)
"""
"""Begins each of them. ``me``: this rank."""

PROGRAM = (
    JOIN
    + """
segment = rank.alloc(4096)
numbers = memoryview(segment).cast("f")
common = dict(comm=0, kind=core.KINDS["allreduce"], dtype=core.DTYPES["float32"], op=core.OPS["SUM"], count=3)

def enter():
    while (view := rank.enter(60.0)) is None:
        pass
    return view

def main():
    view, told = rank.view(), 0
    if view["newcomer"]:
        print(f"newcomer {view['rank']} of {len(view['members'])}", flush=True)
        view = enter()
    service.TakesNewcomers(rank_pb2.TakesNewcomersRequest(job_id=job, rank=me), timeout=60)
    while True:
        numbers[0], numbers[1] = me, os.path.exists("stop")
        numbers[2] = rank.planned() > view["generation"]
        try:
            rank.wait(rank.submit(**common, src=(segment.id, 0), dst=(segment.id, 0)))
        except core.Regrouped:
            view = enter()
            continue
        if view["generation"] != told:
            told = view["generation"]
            mine = f"rank {view['rank']} of {len(view['members'])}"
            print(f"generation {told} {mine} sum {numbers[0]:g}", flush=True)
        if numbers[1]:
            break
        if numbers[2]:
            view = enter()
        time.sleep(0.02)

try:
    main()
except core.Dismissed:
    print("dismissed", flush=True)
numbers.release()
rank.close()
"""
)
