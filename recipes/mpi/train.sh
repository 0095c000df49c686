#!/usr/bin/env bash
# Train with Open MPI: every process of mpirun is a rank.
#
#   recipes/mpi/train.sh 2 my.toml train.name=first --resume                                on this machine
#   HOSTS=node1:8,node2:8 recipes/mpi/train.sh 16 my.toml train.name=first --resume         on two, whose folder is shared
#
# HOSTS are hosts and their slots; the first is where the processes meet, at MASTER_PORT (default 29500).
set -euo pipefail
ranks=${1:?give the number of ranks, and then the arguments of penstock train}
shift
options=(-np "$ranks" --bind-to none)  # Open MPI would keep each process on one core
if [ -n "${HOSTS:-}" ]; then
    export MASTER_ADDR=${MASTER_ADDR:-${HOSTS%%[:,]*}} MASTER_PORT=${MASTER_PORT:-29500}
    options+=(--host "$HOSTS" -x MASTER_ADDR -x MASTER_PORT -x PATH)
fi
exec mpirun "${options[@]}" penstock train "$@"
