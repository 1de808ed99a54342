"""A data plane without a model: steps take the time of a cost model, tokens follow from the seed."""
