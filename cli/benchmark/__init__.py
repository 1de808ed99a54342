"""`quire bench`: what a machine gets with a model. Its plan, its runs of a real suite, its advice, its pictures."""
