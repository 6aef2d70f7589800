"""Looks into traces of jobs, as documents of Chrome trace events."""

import json


def events_of(document, name, thread):
    """Events of a thread of a process, in the order of the file."""
    events = document["traceEvents"]
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == name)
    tid = next(
        e["tid"] for e in events if e["name"] == "thread_name" and (e["pid"], e["args"]["name"]) == (pid, thread)
    )
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]


def assert_perfetto_takes(document):
    """Fails unless the document has all that its importer of JSON needs, and events of a thread nest."""
    document = json.loads(json.dumps(document))
    threads = {}
    for event in document["traceEvents"]:
        assert event["ph"] in "XM" and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        assert spans == sorted(spans, key=lambda one: (one[0], -one[1]))
        around = []
        for begin, end in spans:
            while around and around[-1] <= begin + 1e-3:
                around.pop()
            assert not around or end <= around[-1] + 1e-3
            around.append(end)
