"""The pods of engines and routers, and their parts: probes, security, Secrets, images, model, RDMA and status."""
