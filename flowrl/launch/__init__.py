"""Config files for `accelerate launch --config_file`: how many processes there are, and who holds the weights.

`ddp.yaml`: every process holds everything; right for a LoRA, and also runs on CPUs (`--num_processes 2`, with `--device cpu`
behind `flowrl train`). `fsdp2.yaml`: weights, gradients and optimiser are divided between the processes; for full fine-tuning of
a network that one GPU cannot hold. Precision is `flowrl train --dtype`, so the files leave Accelerate's own off.
"""
