"""The keeper, the process that outlives the daemon, and the wire between the two."""
