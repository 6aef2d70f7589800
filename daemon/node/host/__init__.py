"""The assembly of the daemon as a process: its command line, settings and watches."""
