"""The search for slider settings: from a workload and two objectives to the plan that serves most, or needs least.

``candidates`` says what can be chosen and builds the cluster of a choice, ``trials`` simulates it, ``search`` looks for
the best, ``prediction`` says what to expect of it and what holds it back. Whoever calls runs the trials, in as many
processes as there are.
"""
