#!/usr/bin/env bash
# Run a program or tests on N ranks, each rank a process that prints to this terminal.
#
#   scripts/launch_multi_rank.sh 4 examples/train_qwen3_moe.py --steps 3
#   scripts/launch_multi_rank.sh 4 tests/dispatchers -k uneven
#
# If the first argument after N is a .py file whose name does not start with test_, it is a program
# with its arguments; otherwise all arguments go to pytest, which then runs the tests marked
# ranks(N) and treats a skip and an empty selection as failures (tests/multi_rank.py).
#
# PYTHON chooses the interpreter. Several hosts: start it on each with NNODES, NODE_RANK,
# MASTER_ADDR and MASTER_PORT (default 29500); N is then the number of ranks per host.
set -euo pipefail

if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch_multi_rank.sh N [program.py or pytest arguments], N >= 1" >&2
    exit 2
fi
num_ranks=$1
shift
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    if [[ -x "$repo/.venv/bin/python" ]]; then PYTHON="$repo/.venv/bin/python"; fi
fi

if ((${NNODES:-1} > 1)); then
    where=(
        --nnodes "$NNODES"
        --node-rank "${NODE_RANK:?several hosts need NODE_RANK, 0 to NNODES - 1}"
        --master-addr "${MASTER_ADDR:?several hosts need MASTER_ADDR, the address of host 0}"
        --master-port "${MASTER_PORT:-29500}"
    )
else
    # The address is named because the host's own name may not resolve, in a container for one.
    where=(--standalone --local-addr 127.0.0.1)
fi

if [[ "${1:-}" == *.py && -f "$1" && "$(basename "$1")" != test_* ]]; then
    what=("$repo/scripts/run_program.py" "$@")
else
    # -x: the other ranks cannot go on without the one that failed. --no-summary: the plugin prints
    # a failure at once with its rank. No cache: all ranks would write the same files.
    what=(-m pytest -x -q --no-summary -p no:cacheprovider "$@")
    export EPCOMM_MULTI_RANK=1
fi

export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
# N processes with a thread per core each would only wait for one another.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# exec: Ctrl-C and SIGTERM reach torch.distributed.run itself, which ends every rank: SIGTERM, then
# SIGKILL. It does the same, with a non-zero exit, as soon as one rank has failed.
exec "$PYTHON" -m torch.distributed.run "${where[@]}" --nproc-per-node "$num_ranks" "${what[@]}"
