"""How many engines a load needs: the rate to expect, the headroom over it, and what each number of engines serves."""
