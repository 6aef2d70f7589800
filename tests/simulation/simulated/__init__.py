"""A coordinator's real parts under a clock that jumps, with daemons, a network and a database that fail on purpose."""
