"""The parts of the comparison with other engines: their processes, ratios, tables, plots."""
