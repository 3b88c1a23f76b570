"""What the router reports about itself: readiness, ``Control.GetStatus``, gauges."""
