"""The parts of the attack benchmark: hostile requests, innocent streams, and the suite that serves both."""
