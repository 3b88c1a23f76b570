"""The Deployments of engines and routers: how they are rendered, rolled, and what their status says."""
