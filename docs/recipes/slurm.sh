#!/bin/bash
# flowrl train on several nodes of a SLURM cluster, with a process per GPU that srun starts. Edit the lines marked EDIT,
# then: sbatch slurm.sh. 20 minutes before the time limit SLURM sends SIGTERM, after which the run pauses with a
# checkpoint; the job is then queued again, and resumes the run.
#SBATCH --job-name=flowrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@1200
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

# EDIT: the environment; the run's folder, which every node must see because the next start may be on others; its settings
source "$SLURM_SUBMIT_DIR/venv/bin/activate"
run=$SLURM_SUBMIT_DIR/runs/ocr
options=(--preset sd3.5-medium,tp-grpo,ocr --model "$SLURM_SUBMIT_DIR/stable-diffusion-3.5-medium")

export FLOWRL_CACHE=${TMPDIR:-/tmp}/flowrl-$SLURM_JOB_USER # on each node's disk
export FLOWRL_TIMEOUT_MINUTES=30
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# EDIT: for full fine-tuning, weights sharded within a node and replicated between nodes
# export ACCELERATE_USE_FSDP=true PARALLELISM_CONFIG_DP_REPLICATE_SIZE=$SLURM_NNODES
# EDIT: the network between nodes, if they have several (`ip -brief address` lists them)
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

if [ -e "$run/config.json" ]; then
    options=(--resume "$run")
else
    options+=(--out "$run")
fi
code=0
srun --kill-on-bad-exit=1 python -m flowrl train "${options[@]}" || code=$?
if [ "$code" -eq 130 ]; then # paused
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
