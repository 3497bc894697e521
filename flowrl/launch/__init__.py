"""Config files for `accelerate launch --config_file`: how many processes there are, and who holds the weights.

`ddp.yaml`: every process holds everything; right for a LoRA. It also starts processes on CPUs: `--num_processes 2` before, and
`--device cpu` behind `flowrl train`. `fsdp2.yaml`: weights, gradients and optimiser are divided between the processes, for full
fine-tuning of a network that one GPU cannot hold; `zero2.yaml`: the same, but weights stay whole from a block's forward to its
backward pass. Precision is `flowrl train --dtype`, so the files leave Accelerate's own off.
"""
