"""Parts of `bench.faults`: the plan, what it does to a suite, and the streams meanwhile."""
