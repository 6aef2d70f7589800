"""The services: ``bagua.daemon.coordinator`` (one per cluster) and ``bagua.daemon.node`` (one per host)."""
