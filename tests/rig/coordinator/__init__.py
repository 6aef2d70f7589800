"""A coordinator without sockets, and nodes that tests script or simulate."""
