"""A real Kubernetes for tests, made from package registries alone: no mock, no container registry, no virtual machine.

etcd, the API server, controller manager and scheduler run as processes of this machine; kwok plays nodes without pods
behind them; as root, containerd, kubelet, kube-proxy and CoreDNS make this machine a node whose pods are real. What is
started is stopped whatever happens to the program that started it (see ``cleanup.py``).
"""
