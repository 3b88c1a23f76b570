"""Who may call the router, and the certificates it shows."""
