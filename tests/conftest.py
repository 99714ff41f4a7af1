import os

# As the launcher does for its ranks: on a busy machine, several threads of one small operation
# mostly wait for one another (seen: 0.4 s instead of 2 ms for a backward). Before torch is there.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.multi_rank"]
