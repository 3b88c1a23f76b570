"""DistServe's placement algorithms: parallelism and number of instances for prefills and for decodes.

``instances`` says what can be chosen, ``phase_runs`` simulates a phase or both, ``phase_goodput`` finds the highest
rate of an instance, and ``placement_search`` has the two algorithms.

Source: DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving
(arXiv:2401.09670), section 4.
"""
