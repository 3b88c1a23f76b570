"""Pods: containers, probes, security, Secrets, images, model, RDMA, the user's template, and what a status says."""
