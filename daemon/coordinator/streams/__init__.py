"""Sessions with nodes, and everything that flows through them: directives, logs, traces, watchers."""
