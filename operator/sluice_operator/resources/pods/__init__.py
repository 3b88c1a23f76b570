"""Pods: containers, the user's pod template and its limits, RDMA, the model's volume, and what a pod's status says."""
