"""A discrete-event simulator of a whole cluster, on the very policies of the router and the engine.

``setup`` says what goes in, ``simulation`` runs it on ``engine``s, ``metrics`` sums up what comes out; ``workload`` reads
traces, ``goodput`` searches the highest rate.
"""
