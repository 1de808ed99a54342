"""The suite as local processes: what runs, what must hold before it starts, supervision."""
