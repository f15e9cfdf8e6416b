"""Claims that need a part of the project which is not built yet."""

from validation.claim import not_here

BENCH = "needs an accelerator and the baselines of the bench"

not_here("C22", "updates an hour not lower than dense", "Table 1", BENCH)
