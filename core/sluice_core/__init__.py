"""The pure part of Sluice: records, SLO arithmetic and the policies that decide.

No I/O but reading the profiles that are part of the package (``latency.kernel_fits``) and a model's config.json
(``latency.known_models``, ``model_support``), no clock, no logging, no global random: ``now`` (seconds, any monotonic
origin) and ``rng`` are arguments. The same policy objects run in the router, in the engine's scheduler and in the
simulator.
"""
