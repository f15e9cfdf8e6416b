"""Claims that need a part of the project which is not built yet."""

from validation.claim import not_here

PLANNER = "needs the memory planner over four ranks"
DATA = "needs the paper's data sets"
BENCH = "needs an accelerator and the baselines of the bench"

not_here("C15", "1.5B: 9.18 → 7.18 GiB a GPU; 7B: 31.82 → 17.29", "Table 1", PLANNER)
not_here("C16", "LoRA of the same rank needs more: 13.21 GiB against 7.18", "Table 2", PLANNER)
not_here("C19", "Reasoning-Gym Hard: eight tasks, 38,948 and 193 problems", "Table 3", DATA)
not_here("C20", "DAPO-Math-7.5K: the first 7,500 unique prompts in source order", "C.1", DATA)
not_here("C21", "Pass@1 is the mean over 4 × 500 responses; Pass@4 any of four; unparseable is wrong", "C.1", DATA)
not_here("C22", "updates an hour not lower than dense", "Table 1", BENCH)
not_here("C23", "27B: dense fails at its first Adam allocation, LoGRA fits 80 GB", "Table 1", PLANNER)
