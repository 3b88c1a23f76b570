"""The search for slider settings: from a workload and two objectives to the plan that serves most, or needs least.

``slider_candidates`` says what can be chosen, ``trials`` builds and simulates the cluster of a choice.
``slider_search`` finds the best sliders of a cluster, ``planner`` the fewest GPUs for a rate. ``prediction`` says what
to expect, and ``bottleneck`` what is short. Callers run the trials, in as many processes as they have.
"""
