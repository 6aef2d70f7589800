"""OpenTelemetry for the services and the command line. Needs the extra ``otel`` when it is used, not at import."""
