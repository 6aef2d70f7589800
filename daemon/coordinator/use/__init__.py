"""Use cases: jobs, accounts, code, tuning, the audit log."""
