"""The API server: the verbs we use, and their retries, fencing and rights."""
