"""Engines that take turns in running prefills (EcoServe)."""
