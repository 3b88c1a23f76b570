"""The control plane: the manifest, what it renders to, and which engine gets which role."""
