"""Sluice: what a prompt may cost running decodes, by their slack."""
