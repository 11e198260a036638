#!/usr/bin/env bash
# A training on a GPU cluster with Slurm, one process a GPU:
#
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 launch/slurm.sh \
#     --config=configs/mnist_sinkhorn.py --workdir=/shared/runs/mnist_sinkhorn
#
# from the root of the repository, with requirements-gpu.txt in .venv (or in
# what $PYTHON names). There are as many tasks as GPUs on a node, and each sees
# all of them: no --gpus-per-task. The work directory is on a disk that all nodes
# share. Arguments are those of launch.train.
#
# Two minutes before the time is up, or when the job has to make way for another,
# the training is stopped and saved, and the job goes back into the queue.
#SBATCH --job-name=sinkformer
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail
stopped=75
# The tasks get the signal as well. This shell waits for them.
trap : TERM
srun --kill-on-bad-exit=0 "${PYTHON:-.venv/bin/python}" \
  -m launch.train --distributed "$@"
code=$?
if ((code == stopped)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
