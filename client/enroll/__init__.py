"""The way of a host into an ephemeral cluster: a proof of the job's secret, a certificate for its own key, a token."""
