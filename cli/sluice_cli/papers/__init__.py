"""Papers reproduced in the simulator: what they state, what it gives, and what differs.

``trials`` carries out and remembers, ``findings`` holds what came out beside what the paper states, ``report`` writes
it down. ``taichi`` is the table of a paper's cells, and the modules beside it say what is measured on them.
"""
