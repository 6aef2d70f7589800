"""Assembly of the coordinator's process: its servers, connections, metrics."""
