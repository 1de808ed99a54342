"""What the client APIs share: the context of a call, charges, sizes of answers, ranges of numbers in JSON."""
