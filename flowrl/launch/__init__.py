"""Config files for `accelerate launch --config_file`: replicated or sharded weights.

`ddp.yaml`: every process has all weights; for a LoRA. It also starts CPU processes: put `--num_processes 2` before `-m flowrl`
and `--device cpu` after `flowrl train`. `fsdp2.yaml`: weights, gradients and optimizer state are sharded over the processes, for
full fine-tuning of a network that one GPU cannot train. `zero2.yaml`: the same, but gathered weights remain in memory from a
block's forward to its backward pass. `flowrl train --dtype` sets the precision, so the files switch Accelerate's off.
"""
