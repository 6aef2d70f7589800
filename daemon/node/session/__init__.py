"""The stream to the coordinator, and the lease that it renews."""
