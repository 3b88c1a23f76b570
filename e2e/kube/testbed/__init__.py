"""A real Kubernetes for tests, made from package registries alone: no mock, no container registry, no virtual machine.

etcd, API server, controller manager and scheduler run as processes of this machine. kwok plays nodes whose pods exist
in name only. As root, containerd, kubelet, kube-proxy and CoreDNS make this machine a node with real pods.
``cleanup.py`` stops everything, whatever happens to the program that started it.
"""
