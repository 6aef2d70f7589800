"""A cache of loaded samples: of this host, or of several through Redis. Values are sealed, stores may fail."""
