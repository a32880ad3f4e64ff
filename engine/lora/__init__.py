"""LoRA adapters: read from PEFT's files, kept in host memory by name, copied to device slots as steps need them."""
