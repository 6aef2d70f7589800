"""Jobs that run on this node: engines, ranks, code, records, and the services that ranks call."""
