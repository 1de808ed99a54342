"""The parts of the load benchmark: arrivals, clients, figures, plot."""
