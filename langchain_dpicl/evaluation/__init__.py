"""`dpicl evaluate`: what answers from private examples are worth on a task, beside their privacy."""
