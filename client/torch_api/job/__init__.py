"""A rank joins its job: connection, session, shared memory, beginning and end."""
