"""A discrete-event simulator of a whole cluster, on the very policies of the router and the engine.

``sim_setup`` says what goes in, ``simulation`` runs it on ``engine``s, ``metrics`` sums up what comes out. ``traces``
reads traces, ``workload`` makes requests of them, ``goodput`` searches the highest rate.
"""
