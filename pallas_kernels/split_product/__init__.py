"""Products whose depth is cut between programs, and whose parts the next kernel sums."""
