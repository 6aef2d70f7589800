"""Maintenance by the operator: backup, check, certificates, settings."""
