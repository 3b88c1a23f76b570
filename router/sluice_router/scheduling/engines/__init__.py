"""Engines as the data plane knows them: which there are, what they say, and whether they are well."""
