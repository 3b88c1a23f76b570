"""Sluice: what an iteration and a prompt may cost running decodes, by their slack."""
