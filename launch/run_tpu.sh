#!/usr/bin/env bash
# One host's part of a training on a TPU pod. To be started on all hosts at once:
#
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command=' \
#     cd sinkformer_jax && launch/run_tpu.sh \
#     --config=configs/mnist_sinkhorn.py --workdir=/mnt/runs/mnist_sinkhorn'
#
# The work directory is on a disk that all hosts share. What is needed is
# installed once, into .venv-tpu. Arguments and exit codes are those of
# launch.train.
set -euo pipefail
cd "$(dirname "$0")/.."
installed=.venv-tpu/.installed
(
  # Hosts may share this directory, too.
  flock 9
  if [[ ! requirements.txt -ot $installed ||
    ! requirements-tpu.txt -ot $installed ]]; then
    "${PYTHON:-python3.11}" -m venv .venv-tpu
    .venv-tpu/bin/pip install --quiet -r requirements-tpu.txt
    touch $installed
  fi
) 9>.venv-tpu.lock
# In place of this shell, so that signals reach it.
exec .venv-tpu/bin/python -m launch.train --distributed "$@"
