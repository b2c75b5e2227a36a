"""`dpicl evaluate`: the quality of answers from private examples on a task, beside their privacy."""
