"""Programs, services and users of this machine's system."""
