"""How a host joins an ephemeral cluster: a proof of the job's secret, a certificate for its own key, a token."""
