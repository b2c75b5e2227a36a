"""Which owners take part: Poisson sampling by owner, and the public thresholds of the relevance gate."""
